"""A pruned weight's parameter is its kept values; everything else is torch's.

weight.py     what belongs to one compressed parameter: values, mask, the dense copy
dense.py      the dense weight that ``module.weight`` gives, and its way back to the values
modules.py    the class of a module with compressed parameters
compress.py   `compress_`, `decompress_` and what looks at a compressed model
optim.py      `AdamW`; groups.py: parameter groups for any optimizer
remap.py      `remap_`: other masks for a model in training
"""

__all__ = []
