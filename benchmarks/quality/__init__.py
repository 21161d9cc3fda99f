"""What pruning costs a GPT in quality."""
