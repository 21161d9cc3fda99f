"""samo.AdamW as a torch optimizer: groups, resuming, skipped steps, carried moments, lean state."""

import copy
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import samo
from samo.core.compress import masks as masks_of
from samo.kernels import lean
from tests.core.twins import KINDS, X, batches, compressed, loss_of, mlp, step
from tests.meters import assert_same, small_gpt, tokens
from tests.ranks import run_ranks


def build(kind: str, lr: float = 0.05) -> tuple[nn.Sequential, samo.AdamW, torch.dtype]:
    torch.manual_seed(0)
    options, settings = KINDS[kind]
    model = compressed(**options)
    opt = samo.AdamW(model.parameters(), lr=lr, **settings)
    return model, opt, options["dtype"]


def tensors_of(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {f"model/{name}": value for name, value in model.state_dict().items()}
    for index, state in opt.state_dict()["state"].items():
        found |= {f"{index}/{key}": value for key, value in state.items()}
    return copy.deepcopy(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_and_loaded_run_goes_on_exactly(kind: str) -> None:
    model, opt, dtype = build(kind)
    for x in batches(3, dtype=dtype):
        step(model, opt, x)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin, twin_opt, _ = build(kind, lr=1.0)
    parts: dict[str, Any] = {"model": twin, "opt": twin_opt}
    for part in sorted(parts, reverse="lean" in kind):  # in any order
        parts[part].load_state_dict(saved[part])
    assert twin_opt.param_groups[0]["lr"] == 0.05
    for x in batches(3, dtype=dtype, seed=2):
        step(model, opt, x)
        step(twin, twin_opt, x)
    assert_same(tensors_of(model, opt), tensors_of(twin, twin_opt))


def test_parameters_keep_their_state_whatever_the_order_of_gradients() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(5)) for _ in range(4)]
    theirs = copy.deepcopy(ours)
    opt = samo.AdamW([{"params": ours[:1]}, {"params": ours[1:]}], lr=0.1, kernels="reference")
    twin = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for wanted in ([2], [0, 2], [3, 1], [0, 1, 2, 3], [1], [0, 1, 2, 3]):
        for index in wanted:
            ours[index].grad = torch.randn(5)
            theirs[index].grad = ours[index].grad.clone()
        opt.step()
        twin.step()
        if wanted == [3, 1]:  # others may give them another order, too
            opt.state[ours[2]] = opt.state.pop(ours[2])
            opt.state[ours[1]] = {**opt.state[ours[1]]}
        opt.zero_grad()
        twin.zero_grad()
        assert all(map(torch.equal, ours, theirs))
        for mine, its in zip(ours, theirs):
            assert set(opt.state[mine]) == set(twin.state[its])
            assert_same(opt.state[mine], twin.state[its])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bad", "name"), [(float("nan"), "0.weight"), (-float("inf"), "2.bias")], ids=["nan", "inf"]
)
def test_a_gradient_that_is_not_finite_skips_the_whole_step(
    kind: str, bad: float, name: str
) -> None:
    model, opt, dtype = build(kind)
    step(model, opt, X.to(dtype))
    before = tensors_of(model, opt)
    opt.zero_grad()
    loss_of(model, X.to(dtype)).backward()
    model.get_parameter(name).grad[3] = bad
    opt.step()
    assert opt.skipped_steps == 1
    assert_same(tensors_of(model, opt), before)
    step(model, opt, X.to(dtype))
    assert opt.skipped_steps == 1
    assert not torch.equal(model.state_dict()["0.weight"], before["model/0.weight"])


def test_many_skipped_steps_in_a_row_are_warned_of() -> None:
    model, opt, _ = build("fp32")
    bad = torch.full((1, 12), float("nan"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            step(model, opt, bad)
    told = [str(one.message) for one in caught]
    assert len(told) == 2
    assert told[0].startswith("10 steps in a row were skipped (10 in all)")
    assert opt.skipped_steps == 25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay must be 0 or more, got nan"),
        ({"state": "8bit"}, r"state must be 'exact' \(fp32\) or 'lean' \(8-bit\), got '8bit'"),
        ({"kernels": "fast"}, "kernels must be one of"),
        ({"state": "lean", "entry_steps": True}, "entry_steps=True goes with state='exact' alone"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samo.AdamW(compressed().parameters(), **settings)


def test_types_it_cannot_update_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got the module Linear; use \.parameters\(\)"):
        samo.AdamW(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a parameter of \(3,\) is torch.float16; samo.AdamW up"):
        samo.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.float16))])
    model = compressed(torch.float64)
    with pytest.raises(ValueError, match=r"'0.weight' is float64, which needs state='exact'"):
        samo.AdamW(model.parameters(), state="lean")


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("fp32", "lean fp32"),
        ("lean", "bf16 values"),
        ("fp32", "bf16 values"),
        ("ages", "bf16"),
        ("bf16", "ages"),
    ],
)
def test_state_of_another_kind_is_refused(saved: str, own: str) -> None:
    model, opt, dtype = build(saved)
    step(model, opt, X.to(dtype))
    own_model, other, _ = build(own)  # names are the model's, and an optimizer does not hold it
    needed = f"but this optimizer needs .* with entry_steps={saved == 'ages'}, state='"
    with pytest.raises(samo.MaskError, match=rf"state of '0.weight' has .* {needed}"):
        other.load_state_dict(opt.state_dict())
    assert not other.state
    with pytest.raises(ValueError, match="different number of parameter groups"):
        samo.AdamW(samo.param_groups(own_model)).load_state_dict(opt.state_dict())


def test_a_graph_that_replays_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt, _ = build("fp32")
    loss_of(model, X).backward()
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(samo.CompressionError, match=r"state of '0.weight' is created by the first"):
        opt.step()
    monkeypatch.undo()
    opt.step()
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(samo.CompressionError, match=r"'0.weight' is on the CPU, and a CUDA graph"):
        opt.step()


# Moments of a dense phase -----------------------------------------------------------------------


def test_moments_go_on_over_a_prune_as_if_the_state_had_stayed_dense() -> None:
    """Five dense steps, a prune, five more: bit for bit what the masked dense optimizer does."""
    torch.manual_seed(0)
    masked = mlp()
    ours = copy.deepcopy(masked)
    opts = [torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False) for net in (masked, ours)]
    for x in batches(5):
        for net, opt in zip((masked, ours), opts):
            step(net, opt, x)
    masks = samo.prune(masked, 0.7)
    masks.apply_(masked)
    samo.compress_(ours, masks, kernels="reference")
    own = samo.AdamW(ours.parameters(), lr=0.01, kernels="reference", entry_steps=True)
    own.carry_over(opts[1])
    assert (own.state[ours.get_parameter("0.weight")]["age"] == 5).all()
    for x in batches(5, seed=2):
        step(ours, own, x)
        opts[0].zero_grad()
        loss_of(masked, x).backward()
        for name, param in masks.parameters_of(masked).items():
            masks[name].zero_(param.grad)
        opts[0].step()
        masks.apply_(masked)
    state = samo.dense_state_dict(ours)
    assert all(torch.equal(state[name], value) for name, value in masked.state_dict().items())
    assert all(float(state["step"]) == 10 for state in own.state.values())


def test_moments_of_another_optimizer_are_refused_and_none_are_taken() -> None:
    model = mlp()
    sgd, adam = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model.parameters()),
    )
    step(model, sgd, X)
    samo.compress_(model, samo.prune(model, 0.5))
    opt = samo.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"SGD keeps momentum_buffer for '0.weight'"):
        opt.carry_over(sgd)
    opt.carry_over(adam)  # has had no step
    assert not opt.state


# Ages of entries --------------------------------------------------------------------------------


@pytest.mark.parametrize("entry_steps", [True, False])
def test_the_first_update_of_a_late_entry_is_no_larger_than_the_rate(entry_steps: bool) -> None:
    """Adam's first update is lr; with the step count of the tensor it is 3.16 times as large."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    half = samo.Mask.from_bool(torch.arange(1024).view(32, 32) % 2 == 0)
    samo.compress_(model, samo.Masks({"0.weight": half}))
    opt = samo.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.0, eps=0.0, entry_steps=entry_steps
    )
    (values,) = model.parameters()
    model(torch.randn(4, 32)).square().mean().backward()
    opt.step()
    opt.state[values]["step"].fill_(20_000)
    opt.zero_grad()
    samo.remap_(model, samo.Masks({"0.weight": samo.Mask.ones((32, 32))}), opt)
    model(torch.randn(4, 32)).square().mean().backward()
    opt.step()
    late = model[0].weight.abs()[~half.to_bool()]
    expected = 1e-3 if entry_steps else 1e-3 * 0.1 / 0.001**0.5
    torch.testing.assert_close(late, torch.full_like(late, expected), rtol=1e-3, atol=0)


def test_ages_and_counts_out_of_range_are_refused(tmp_path: Path) -> None:
    model, opt, dtype = build("ages")
    step(model, opt, X.to(dtype))
    state = opt.state[model.get_parameter("0.weight")]
    for key, message in (("age", "ages must be 0 or more, got -7"), ("step", "step must be 0 or")):
        good = state[key].clone()
        state[key].fill_(-7)
        with pytest.raises(samo.MaskError, match=rf"state of '0.weight' is damaged: {message}"):
            opt.load_state_dict(opt.state_dict())
        samo.save(tmp_path / key, model, opt)
        with pytest.raises(samo.CheckpointError, match=rf"state of '0.weight': {message}"):
            samo.load(tmp_path / key, model, opt)
        state[key].copy_(good)
    opt.load_state_dict(opt.state_dict())


def test_step_counts_that_are_numbers_are_taken() -> None:
    model, opt, dtype = build("fp32")
    step(model, opt, X.to(dtype))
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        state["step"] = float(state["step"])
    opt.load_state_dict(saved)
    step(model, opt, X.to(dtype))
    assert opt.state[model.get_parameter("0.weight")]["step"].item() == 2


# Lean state -------------------------------------------------------------------------------------


def test_lean_state_trains_about_as_well_as_exact_state() -> None:
    torch.manual_seed(3)
    teacher = mlp()
    losses = []
    for kind in ("bf16 values", "lean"):
        model, opt, dtype = build(kind, lr=3e-3)
        seen = []
        for x in batches(200):
            opt.zero_grad()
            loss = (model(x.to(dtype)).float() - teacher(x).detach()).square().mean()
            loss.backward()
            opt.step()
            seen.append(float(loss.detach()))
        losses.append(sum(seen[-40:]) / 40)
        assert losses[-1] < 0.5 * seen[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_moments_of_a_dense_phase_are_carried_over_to_lean_state() -> None:
    model = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 12))
    dense = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        dense.zero_grad()
        model(torch.randn(5, 60)).square().mean().backward()
        dense.step()
    old = {name: dense.state[param] for name, param in model.named_parameters()}
    masks = samo.prune(model, 0.5)
    samo.compress_(model, masks, dtype=torch.bfloat16, value_dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters(), state="lean")
    opt.carry_over(dense)
    assert masks_of(model).fingerprint() == masks.fingerprint()
    for name, param in model.named_parameters():
        state = opt.state[param]
        keys = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        keep = masks[name].to_bool().view(-1) if name in masks else None
        groups = lean.group_numbers(old[name]["exp_avg"].numel(), keep, param.device)
        found = lean.dequantise(lean.Moments(*(state[key] for key in keys)), groups)
        for key, moment in zip(keys, found):
            whole = old[name][key].view(-1)
            kept = whole if keep is None else whole[keep]
            # Half a code is 1.6 % of the largest, and less further down.
            torch.testing.assert_close(moment, kept, rtol=0, atol=0.017 * float(kept.abs().max()))
        assert state["step"] == 3


# Shards -----------------------------------------------------------------------------------------


def train_shards(rank: int, num_ranks: int) -> dict[str, Any]:
    """Train bfloat16 parameters in shards, uneven and empty ones, beside whole ones."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    draw = torch.Generator().manual_seed(0)
    wholes = [nn.Parameter(torch.randn(n, 3, generator=draw).bfloat16()) for n in (7, 1, 4)]
    shards = [nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])) for param in wholes]
    reference, opt = (samo.AdamW(params, lr=0.1) for params in (wholes, shards))
    for number in range(5):
        if number == 3:
            saved, opt = opt.state_dict(), samo.AdamW(shards, lr=1.0)
            opt.load_state_dict(saved)
        for whole, shard in zip(wholes, shards):
            whole.grad = torch.randn(whole.shape, generator=draw).bfloat16()
            if number == 1:
                whole.grad[-1] = float("nan")  # on one rank alone
            shard.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        reference.step()
        opt.step()
    opt.zero_grad()
    opt.step()  # nobody has gradients, and all agree
    for settings, message in (
        ({"state": "lean"}, "state='lean' is for whole parameters"),
        ({"entry_steps": True}, "entry_steps=True is for whole parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            samo.AdamW(shards, **settings)
    with pytest.raises(samo.MaskError, match="load sharded state with set_optimizer_state_dict"):
        opt.load_state_dict(reference.state_dict())
    assert reference.skipped_steps == 1
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(wholes, shards))
    return {
        key: (value.placements == (Shard(0),), value.to_local().numel())
        for key, value in opt.state[shards[0]].items()
        if key != "step"
    }


def test_shards_are_updated_as_whole_parameters() -> None:
    """With a NaN that one rank alone sees."""
    for found, size in zip(run_ranks(4, train_shards), (6, 6, 6, 3)):
        assert found == dict.fromkeys(("exp_avg", "exp_avg_sq", "remainder"), (True, size))


# What a step costs the host ---------------------------------------------------------------------

SOURCES = str(Path(samo.__file__).parent)
MODELS = str(Path(SOURCES) / "models/gpt.py")


def calls_of(action: Callable[[], object]) -> int:
    """Return how many functions of samo an action calls, those of its models apart."""
    count = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        path = frame.f_code.co_filename
        count += event == "call" and path.startswith(SOURCES) and path != MODELS

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(num_layers: int) -> tuple[int, int]:
    """Return the calls of a forward pass and of an update, once dense weights and state exist."""
    model = small_gpt(num_layers=num_layers)
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters())
    inputs = tokens()
    for _ in range(2):
        forward = calls_of(lambda: model(inputs))
        model(inputs).float().sum().backward()
        update = calls_of(opt.step)
        opt.zero_grad()
    return forward, update


def test_a_weight_costs_a_step_few_calls() -> None:
    """On a GPU a small model waits for the host."""
    few, many = calls_of_a_step(1), calls_of_a_step(5)
    num_weights = 4 * 12  # four layers more: 4 pruned matrices and 8 vectors in each
    forward, update = ((after - before) / num_weights for before, after in zip(few, many))
    assert forward <= 2  # the property and Weight.read
    assert update <= 20
