"""Tools for those who work on samo."""
