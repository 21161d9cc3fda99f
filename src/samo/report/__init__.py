"""The report of one or several runs: read run folders, draw figures, write one HTML file."""
