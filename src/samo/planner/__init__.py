"""Plan a training run before it starts: memory, step time and layout by arithmetic, without torch.

- hardware: GPUs, links and clusters, as a table or a file
- network, configs, modules: the tensors of a model, from a shape, a config.json or a module
- memory: peak bytes by kind; cost: seconds of a step by kind
- simulator: the pipeline's own engine in virtual time
- search: the best layouts; choose: one of them; answer, render: `samo.plan`, and its text

`modules` and `local`, which describes this machine, alone import torch. `samo.bench.machine` times
a machine and writes a hardware file.
"""

__all__ = []
