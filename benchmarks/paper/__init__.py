"""The SAMO paper's figures again: what was published, what a model predicts, and what samo changes."""
