"""What pruning costs in quality: GPTs on real text, and a VGG on images."""

__all__ = []
