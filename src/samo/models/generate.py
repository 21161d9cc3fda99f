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
    """Return the prompt and ``num_tokens`` sampled tokens.

    Example:
        >>> from samo.models.gpt import GPT, GPTConfig
        >>> model = GPT(GPTConfig(num_layers=1, width=16, num_heads=2, context=8))
        >>> generate(model, torch.tensor([1, 2, 3]), 5, context=8).shape
        torch.Size([8])

    Args:
        model: Maps tokens (1, T) to logits (1, T, V).
        prompt_T: At least one token.
        num_tokens: Tokens to sample.
        context: Longest sequence the model takes.
        temperature: Divides the logits.
        seed: Of the sampling.
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
