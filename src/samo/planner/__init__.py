"""Plan a training run before it starts: memory, step time and layout by arithmetic, without torch.

- hardware: GPUs, links and clusters, as a table or a file
- network, configs, public, folders, modules: the tensors of a model, and what is pruned of them
- memory: peak bytes by kind; cost: seconds of a step by kind
- search: the best layouts, and one of them
- simulator: the pipeline's own engine in virtual time
- answer, render, command: `samo.plan`, its text, and what to type

`modules` and `local`, which describes this machine, alone import torch. `samo.bench.machine` times
a machine and writes a hardware file.
"""

__all__ = []
