"""The small GPT that `samo train` trains, its published sizes, and generation."""
