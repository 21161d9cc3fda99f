"""What pruning costs a pretrained language model, and what training brings back."""
