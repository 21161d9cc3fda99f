"""A pruned weight's parameter is its kept values; the rest is torch.

Compressing a model
    compress.py     `compress_`, `decompress_`, `dense_state_dict`, `masks`
    modules.py      the class of a module with compressed parameters
    weight.py       one compressed parameter: values, mask, resident dense copy

Reading ``module.weight``
    dense.py        resident: values -> dense weight -> compressed gradient
    streamed.py     streamed: expanded where it is used, and what is written to an expansion
    products.py     products that save no dense weight for backward
    traced.py       inside torch.compile and torch.export

Training
    adamw.py        `AdamW`
    param_groups.py `param_groups`: decay and learning rates by dense shape and density
    step_hooks.py   before and after the step of any other optimizer
    remap.py        `remap_`: new masks for a model in training
    shards.py       parameters that FSDP2 has sharded
    rank_checks.py  replicas and shards must have the same masks
"""
