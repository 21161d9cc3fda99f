"""Dynamic loss scaling for float16 weights.

float16 cannot hold gradients under 6e-8. The loss is multiplied by a large factor before backward;
each gradient is divided by it again in the moment it is compressed, so that ``.grad`` always is the
true gradient and clipping needs no extra step. A step whose gradients overflowed is skipped and the
factor halved; after enough good steps it is doubled. All of it stays on the device.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn

from samo.errors import CompressionError
from samo.owners import owned_weights

__all__ = ["LossScaler"]

_SMALLEST: Final = 2.0**-32
_LARGEST: Final = 2.0**32


class LossScaler:
    """Scale the loss of a float16 model; the optimizer's ``step()`` adjusts the scale by itself.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.float16)
        >>> scaler = samo.LossScaler(model)
        >>> opt = samo.AdamW(samo.parameters(model), lr=1e-3)
        >>> loss = model(torch.randn(2, 8, dtype=torch.float16)).float().square().mean()
        >>> scaler.scale(loss).backward()    # gradients come out unscaled
        >>> opt.step()                       # and this tells the scaler whether they overflowed
        >>> scaler.get_scale()
        65536.0

    Args:
        model: A compressed model.
        init_scale: First factor; a power of two keeps every multiplication exact.
        growth_factor: Factor on the scale after ``growth_interval`` good steps in a row.
        backoff_factor: Factor on the scale after an overflow.
        growth_interval: Good steps in a row before the scale grows.

    Raises:
        CompressionError: The model is not compressed.
        ValueError: A factor is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                f"a loss scaler needs init_scale > 0, growth_factor > 1 and backoff_factor in (0, 1)"
                f", got {init_scale}, {growth_factor} and {backoff_factor}"
            )
        weights = list(owned_weights(model).values())
        if not weights:
            raise CompressionError(
                "the model is not compressed; call samo.compress_(model, masks) first"
            )
        device = weights[0].param.device
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._scale = torch.tensor(float(init_scale), device=device)
        self._good_steps = torch.tensor(0, dtype=torch.int32, device=device)
        self.inverse = self._scale.reciprocal()  # what compression multiplies gradients by
        for weight in weights:
            weight.scaler = self

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss before ``backward()``.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.float16)
            >>> samo.LossScaler(model, init_scale=8.0).scale(torch.tensor(2.0))
            tensor(16.)
        """
        return loss * self._scale.to(loss.device)

    def get_scale(self) -> float:
        """Return the present scale; waits for the device.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.float16)
            >>> samo.LossScaler(model, init_scale=1024.0).get_scale()
            1024.0
        """
        return float(self._scale)

    def update(self, nonfinite: Tensor) -> None:
        """Adjust the scale after a step; optimizers call this.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.float16)
            >>> scaler = samo.LossScaler(model, init_scale=1024.0)
            >>> scaler.update(torch.tensor(True))
            >>> scaler.get_scale()
            512.0
        """
        bad = nonfinite.to(self._scale.device)
        self._good_steps.copy_(torch.where(bad, 0, self._good_steps + 1))
        grows = self._good_steps >= self.growth_interval
        factor = torch.where(bad, self.backoff_factor, torch.where(grows, self.growth_factor, 1.0))
        self._scale.mul_(factor).clamp_(_SMALLEST, _LARGEST)  # at 0 or infinity it would stay
        self._good_steps.mul_(~grows)
        torch.reciprocal(self._scale, out=self.inverse)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count of good steps.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.float16)
            >>> samo.LossScaler(model, init_scale=4.0).state_dict()
            {'scale': 4.0, 'good_steps': 0}
        """
        return {"scale": float(self._scale), "good_steps": int(self._good_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved scale.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.float16)
            >>> scaler = samo.LossScaler(model)
            >>> scaler.load_state_dict({"scale": 4.0, "good_steps": 3})
            >>> scaler.get_scale()
            4.0
        """
        self._scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])
        torch.reciprocal(self._scale, out=self.inverse)
