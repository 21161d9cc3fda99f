"""Everything that makes masks.

prune          by magnitude, at random, or by the inputs of the weights
scope          which tensors are compared: each, all, by ERK or by OWL; n:m `pattern`
topk           the largest of them, or of neighbours
calibrated     by inputs: `blocks` runs a model block by block, `input_stats` watches its products,
               then Wanda, OWL or `sparsegpt` decide
early_bird     once the mask of a dense model in training stabilizes
mask_schedules while a compressed model trains: gradual pruning, SET, RigL
growth         which entries those drop and grow
"""
