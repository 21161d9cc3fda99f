"""A pruned weight's parameter is its kept values; the rest is torch.

Compressing a model
    compress.py     `compress_`, `decompress_`, `dense_state_dict`, `masks`
    checks.py       what `compress_` will do to each parameter, and what it rejects
    modules.py      the class of a module with compressed parameters
    weight.py       one compressed parameter: values, mask, resident dense copy

Reading ``module.weight``
    dense.py        resident: values -> dense weight -> compressed gradient
    expansion.py    streamed: a dense weight that is expanded lazily
    streamed.py     the same as a tensor, for eager code
    products.py     products that save no dense weight for backward
    writes.py       writes to expansions reach the values
    traced.py       inside torch.compile and torch.export

Training
    optim.py        `AdamW`
    step_hooks.py   before and after the step of any optimizer
    groups.py       parameter groups for any optimizer
    remap.py        `remap_`: new masks for a model in training
    transfer.py     moves vectors of kept entries from one mask to another
    shards.py       DTensor helpers, for FSDP2
    rank_checks.py  replicas and shards must have the same masks
"""

__all__ = []
