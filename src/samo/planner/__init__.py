"""Plan a training run before it starts: memory, step time and layout by arithmetic, without torch.

- hardware: GPUs, links and clusters, as a table or a file
- network, configs, public_models: the tensors of a model; sparsity: what is pruned of them
- memory: peak bytes by kind; cost: seconds of a step by kind
- search: the best layouts, and one of them; advice: what would fit, if nothing does
- simulator: the pipeline's own engine in virtual time
- answer, render, suggested_command: `samo.plan`, its text, and what to type

`this_machine` alone imports torch. `samo.bench.measure_machine` times a machine and writes a
hardware file.
"""
