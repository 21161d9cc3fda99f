"""What streamed and compiled weights cost a step on a GPU."""
