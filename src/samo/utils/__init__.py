"""What every package may use: atomic files, checks of arguments, numbers as text."""
