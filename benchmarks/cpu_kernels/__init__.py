"""The CPU kernels beside other ways to do the same."""
