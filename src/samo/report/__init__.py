"""What a run did, as a page for the eye: read run folders, draw them, write one HTML file."""

__all__ = []
