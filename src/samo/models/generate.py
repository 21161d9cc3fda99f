"""Sample text from a model, one token at a time."""

import torch
from torch import Tensor, nn

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_T: Tensor,
    num_tokens: int,
    *,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Tensor:
    """Return a prompt of at least one token, and ``num_tokens`` sampled tokens.

    The model maps tokens (1, T), at most ``context`` of them, to logits (1, T, V).
    """
    device = next(model.parameters()).device
    tokens_T = prompt_T.to(device)
    random = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    for _ in range(num_tokens):
        logits_V = model(tokens_T[None, -context:])[0, -1].float().cpu()
        chances_V = torch.softmax(logits_V / temperature, dim=-1)
        drawn = torch.multinomial(chances_V, 1, generator=random)
        tokens_T = torch.cat([tokens_T, drawn.to(device)])
    model.train(was_training)
    return tokens_T.cpu()
