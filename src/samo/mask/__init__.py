"""Which weights are kept: bitmaps, masks of whole models, their files, and what can be pruned."""
