"""Models from elsewhere: checkpoints, run folders and Hugging Face model folders."""

__all__ = []
