"""Loss scaling for float16."""

import pytest
import torch
from torch import nn

import samo


def compressed(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    samo.compress_(model, samo.prune(model, 0.5), dtype=dtype)
    return model


def test_gradients_come_out_unscaled_and_small_ones_survive() -> None:
    """A gradient of 2**-30 is 0 in float16; scaled by 2**16 it is not."""
    x = torch.full((1, 4), 2.0**-10, dtype=torch.float16)
    grads = {}
    for scale in (1.0, 2.0**16):
        model = compressed()
        scaler = samo.LossScaler(model, init_scale=scale)
        scaler.scale(model(x).float().sum() * 2.0**-20).backward()
        (leaf,) = samo.parameters(model)
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        grads[scale] = leaf.grad.tolist()
    assert grads[1.0] == [0.0] * 8
    assert grads[2.0**16] == [2.0**-30] * 8


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    model = compressed()
    scaler = samo.LossScaler(model, init_scale=2.0**24, growth_interval=2)
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    before = model[0].weight.clone()
    x = torch.ones(1, 4, dtype=torch.float16)
    scaler.scale(model(x).float().sum()).backward()
    opt.step()
    assert opt.skipped_steps == 1
    assert scaler.get_scale() == 2.0**23
    assert torch.equal(model[0].weight, before)


def test_the_scale_grows_after_enough_good_steps() -> None:
    model = compressed()
    scaler = samo.LossScaler(model, init_scale=8.0, growth_interval=3)
    opt = torch.optim.SGD(samo.parameters(model), lr=0.01)
    scales = []
    for _ in range(7):
        opt.zero_grad()
        scaler.scale(model(torch.ones(1, 4, dtype=torch.float16)).float().sum()).backward()
        opt.step()
        scales.append(scaler.get_scale())
    assert scales == [8, 8, 16, 16, 16, 32, 32]


def test_the_state_is_saved_and_loaded() -> None:
    model = compressed()
    scaler = samo.LossScaler(model, init_scale=8.0, growth_interval=2)
    scaler.update(torch.tensor(False))
    other = samo.LossScaler(model, growth_interval=2)
    other.load_state_dict(scaler.state_dict())
    other.update(torch.tensor(False))
    assert other.get_scale() == 16.0
    assert float(other.inverse) == 1 / 16


def test_float16_without_a_scaler_is_warned_about() -> None:
    model = compressed()
    opt = samo.AdamW(samo.parameters(model))
    model(torch.ones(1, 4, dtype=torch.float16)).float().sum().backward()
    with pytest.warns(UserWarning, match="float16 and trained without a loss scaler"):
        opt.step()


@pytest.mark.parametrize(
    "settings", [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.5}], ids=str
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a loss scaler needs init_scale > 0"):
        samo.LossScaler(compressed(), **settings)  # type: ignore[arg-type]


def test_a_scaler_needs_a_compressed_model() -> None:
    with pytest.raises(samo.CompressionError, match="the model is not compressed"):
        samo.LossScaler(nn.Linear(2, 2))


def test_the_scale_never_sticks_at_zero_or_infinity() -> None:
    model = compressed()
    scaler = samo.LossScaler(model, growth_interval=1)
    for is_bad in (True, False):
        for _ in range(300):
            scaler.update(torch.tensor(is_bad))
        extreme = scaler.get_scale()
        assert 0 < extreme < float("inf")
        scaler.update(torch.tensor(not is_bad))
        assert scaler.get_scale() != extreme


def test_a_loaded_count_past_the_interval_lets_the_scale_grow() -> None:
    scaler = samo.LossScaler(compressed(), growth_interval=10)
    scaler.load_state_dict({"scale": 4.0, "good_steps": 100})
    scaler.update(torch.tensor(False))
    assert scaler.get_scale() == 8.0
