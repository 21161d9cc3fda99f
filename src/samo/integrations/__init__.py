"""Models of other libraries."""

__all__ = []
