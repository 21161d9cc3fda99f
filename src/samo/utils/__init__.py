"""What every package may use: files that survive a crash, checks of arguments, numbers as text."""

__all__ = []
