"""Plan a training run before it starts: memory, step time and layout by arithmetic, without torch.

- hardware: GPUs, links and clusters, as a table or a file
- network: the tensors of a model, from a named shape, a config.json or a module
- memory: peak bytes by kind; cost: seconds of a step by kind
- simulator: the pipeline's own engine in virtual time
- search: the best layouts; answer: what `samo.plan` returns
- measure: time this machine, and write a hardware file (imports torch)
"""

__all__ = []
