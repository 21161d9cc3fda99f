"""samo.save and samo.load: everything comes back, training resumes exactly, what does not fit is refused."""

import copy
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

import samo
from samo import checkpoint
from samo.checkpoint import manifest as manifests, tensors
from samo.checkpoint.tensors import SavedTensors, write_tensors
from samo.errors import CheckpointError, MaskError
from samo.utils import safetensors_io

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many real ones take seconds; test_atomic_io.py has them."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Net(nn.Module):
    """Pruned matrices, a tied head, a batch norm, a scalar, a frozen layer and all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.body = nn.Linear(12, 12)
        self.still = nn.Linear(12, 12, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(12)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(12, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.embed(tokens)))
        x = self.norm((x + self.still(x)).float()).to(x.dtype)
        return self.head(x * self.gain)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def masks(model: nn.Module) -> samo.Masks:
    return samo.prune(model, rules={"body.weight": 0.75, "still.weight": 0.5}, sparsity=0.5)


def compressed(
    dtype: torch.dtype = torch.float32, seed: int = 0, given: samo.Masks | None = None, **types: Any
) -> Net:
    model = net(seed)
    samo.compress_(model, given or masks(net()), dtype=dtype, **types)
    return model


def step(
    model: nn.Module,
    opt: Optimizer | list[Optimizer],
    seed: int,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    loss = model(torch.randint(0, 7, (16,)).to(device)).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    for one in opt if isinstance(opt, list) else [opt]:
        one.step() if scaler is None else scaler.step(one)
        one.zero_grad()
    if scaler is not None:
        scaler.update()


def state_of(model: nn.Module, *opts: Optimizer) -> dict[str, Any]:
    """Return copies of all that training depends on."""
    found: dict[str, Any] = {**model.state_dict(), "opts": [opt.state_dict() for opt in opts]}
    return copy.deepcopy(found)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b), f"{type(a)} against {type(b)}"
    if isinstance(a, dict):
        assert sorted(map(str, a)) == sorted(map(str, b))
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b):
            assert_same(one, other)
    elif isinstance(a, Tensor):
        assert (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        assert torch.equal(safetensors_io.host_bytes(a), safetensors_io.host_bytes(b))
    else:
        assert a == b


Build = Callable[[nn.Module], Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "samo.AdamW": lambda m: samo.AdamW(samo.param_groups(m, weight_decay=0.1), lr=0.05),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.named_parameters(), lr=torch.tensor(0.05)),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.05, centered=True),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "ages": lambda m: samo.AdamW(m.parameters(), lr=0.05, entry_steps=True),
}


# What comes back


CASES = [
    *((kind, torch.bfloat16) for kind in OPTIMIZERS),
    *(
        (kind, dtype)
        for kind in ("samo.AdamW", "SGD")
        for dtype in DTYPES
        if dtype != torch.bfloat16
    ),
]


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_training_resumes_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, again = compressed(dtype), compressed(dtype, seed=1)
    opt, again_opt = OPTIMIZERS[kind](model), OPTIMIZERS[kind](again)
    half = dtype == torch.float16
    scaler, again_scaler = (
        torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) if half else None
        for scale in (64.0, 8.0)
    )
    for seed in range(2):
        step(model, opt, seed, scaler)
        step(again, again_opt, seed + 50, again_scaler)  # leaves state that has to go
    samo.save(tmp_path / "a", model, opt, scaler=scaler)
    assert samo.load(tmp_path / "a", again, again_opt, scaler=again_scaler) == {}
    assert_same(state_of(again, again_opt), state_of(model, opt))
    for seed in range(2, 4):
        step(model, opt, seed, scaler)
        step(again, again_opt, seed, again_scaler)
    assert_same(state_of(again, again_opt), state_of(model, opt))
    samo.save(tmp_path / "b", model, opt)
    samo.save(tmp_path / "c", again, again_opt)
    files = [checkpoint.read_manifest(tmp_path / name).files for name in "bc"]
    assert files[0] == files[1]  # with their SHA-256: equal state is equal bytes
    if scaler is not None and again_scaler is not None:
        assert scaler.get_scale() == again_scaler.get_scale() != 64.0


LEAN = {"dtype": torch.bfloat16, "value_dtype": torch.bfloat16}
NARROW = {"dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}


@pytest.mark.parametrize("types", [{}, NARROW, LEAN], ids=["fp32", "bf16 gradients", "bf16 values"])
@pytest.mark.parametrize("state", ["exact", "lean"])
def test_all_kinds_of_state_resume_bit_for_bit(
    state: Any, types: dict[str, Any], tmp_path: Path
) -> None:
    model, again = compressed(**types), compressed(seed=1, **types)
    opt, again_opt = (
        samo.AdamW(samo.param_groups(m, weight_decay=0.1), lr=0.05, state=state)
        for m in (model, again)
    )
    for i in range(2):
        step(model, opt, i)
    samo.save(tmp_path / "a", model, opt)
    samo.load(tmp_path / "a", again, again_opt)
    assert_same(state_of(again, again_opt), state_of(model, opt))
    step(model, opt, 2)
    step(again, again_opt, 2)
    assert_same(state_of(again, again_opt), state_of(model, opt))
    if types is LEAN and state == "lean":  # or a lost correction would not be noticed
        saved = SavedTensors(tmp_path / "a", checkpoint.read_manifest(tmp_path / "a"), "optimizer")
        assert int(saved.read("body.weight/correction").count_nonzero()) > 0
        assert {name.partition("/")[2] for name in saved.specs} == {
            "step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "correction",
        }  # fmt: skip


@pytest.mark.parametrize("saved", ["exact", "lean"])
def test_optimizer_state_of_another_kind_is_refused(saved: Any, tmp_path: Path) -> None:
    model, other = compressed(torch.bfloat16), compressed(torch.bfloat16)
    own: Any = "lean" if saved == "exact" else "exact"
    opt = samo.AdamW(model.parameters(), state=saved)
    step(model, opt, 0)
    samo.save(tmp_path / "a", model, opt)
    message = f"has {saved} optimizer state .* keeps {own} state; .* with state='{saved}'"
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path / "a", other, samo.AdamW(other.parameters(), state=own))
    samo.load(tmp_path / "a", other)  # the weights alone go into any
    step(other, samo.AdamW(other.parameters(), state=own), 1)


@pytest.mark.parametrize("is_counting", [False, True])
def test_ages_are_there_exactly_if_they_are_counted(is_counting: bool, tmp_path: Path) -> None:
    model = compressed()
    opt = samo.AdamW(model.parameters(), entry_steps=is_counting)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    message = f"step counts of the entries .* entry_steps={is_counting}"
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path, model, samo.AdamW(model.parameters(), entry_steps=not is_counting))


def several(model: Net) -> list[Optimizer]:
    params = dict(model.named_parameters())
    body, embed = params.pop("body.weight"), params.pop("embed.weight")
    return [
        samo.AdamW([body], lr=torch.tensor(0.05)),
        torch.optim.SGD([embed], lr=0.05, momentum=0.9),
        samo.AdamW(params.items(), lr=torch.tensor(0.02)),
    ]


def test_several_optimizers_resume_bit_for_bit(tmp_path: Path) -> None:
    model, again = compressed(torch.bfloat16), compressed(torch.bfloat16, seed=1)
    opts, again_opts = several(model), several(again)
    for i in range(3):
        step(model, opts, i)
    samo.save(tmp_path, model, opts)
    samo.load(tmp_path, again, again_opts)
    step(model, opts, 3)
    step(again, again_opts, 3)
    assert_same(state_of(again, *again_opts), state_of(model, *opts))
    found = checkpoint.read_manifest(tmp_path).optimizers
    assert [entry["class"] for entry in found] == ["samo.AdamW", "torch.optim.SGD", "samo.AdamW"]
    message = r"has the state of 3 optimizers \(samo.AdamW, .* was given 2; give"
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path, again, again_opts[:2])
    with pytest.raises(CheckpointError, match=r"of a samo.AdamW, not of a torch.optim.SGD"):
        samo.load(tmp_path, again, again_opts[1:] + again_opts[:1])
    samo.load(tmp_path, again)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["samo.AdamW", "Adam", "AdamW fused"])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids=str)
def test_a_checkpoint_goes_to_the_device_of_the_model(
    kind: str, devices: tuple[str, str], tmp_path: Path
) -> None:
    model = compressed(torch.bfloat16).to(devices[0])
    again = compressed(torch.bfloat16, seed=1).to(devices[1])
    build = OPTIMIZERS[kind]
    if kind == "Adam":  # a learning rate that is a tensor stays on the host

        def build(m: nn.Module) -> Optimizer:
            return torch.optim.Adam(m.parameters(), lr=torch.tensor(0.05), foreach=False)

    opt, again_opt = build(model), build(again)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert_same(
        torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, state_of(again, again_opt)),
        torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, state_of(model, opt)),
    )
    assert {value.device.type for value in again.state_dict().values()} == {devices[1]}
    step(again, again_opt, 1)
    if devices == ("cuda", "cuda"):
        step(model, opt, 1)
        assert_same(state_of(again, again_opt), state_of(model, opt))


def test_a_bfloat16_model_keeps_the_types_of_its_optimizer_state(tmp_path: Path) -> None:
    """torch's own load_state_dict would round what is fp32 here to the parameter's type."""
    model, again = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16()
    opt, again_opt = (torch.optim.SGD(m.parameters(), momentum=0.9) for m in (model, again))
    for param in model.parameters():
        opt.state[param]["momentum_buffer"] = torch.randn(param.shape)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert_same(again_opt.state_dict(), opt.state_dict())


DENSE: dict[str, Build] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, amsgrad=True),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),  # with lists
}


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_model_resumes_too(kind: str, tmp_path: Path) -> None:
    model, again = nn.Linear(4, 4), nn.Linear(4, 4)
    opts = [DENSE[kind](m) for m in (model, again)]

    def train(model: nn.Module, opt: Optimizer) -> None:
        def closure() -> float:
            opt.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss.item()

        opt.step(closure)

    train(model, opts[0])
    samo.save(tmp_path, model, opts[0])
    samo.load(tmp_path, again, opts[1])
    assert_same(opts[1].state_dict(), opts[0].state_dict())
    for m, opt in zip((model, again), opts):
        train(m, opt)
    assert_same(state_of(again, opts[1]), state_of(model, opts[0]))


def test_an_optimizer_before_its_first_step_comes_back_without_state(tmp_path: Path) -> None:
    model, again = compressed(), compressed(seed=1)
    opt, again_opt = OPTIMIZERS["samo.AdamW"](model), OPTIMIZERS["samo.AdamW"](again)
    step(again, again_opt, 0)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert not again_opt.state
    step(model, opt, 1)
    step(again, again_opt, 1)
    assert_same(state_of(again, again_opt), state_of(model, opt))


def test_settings_of_groups_come_back_with_those_of_a_scheduler(tmp_path: Path) -> None:
    model, again = compressed(), compressed()
    groups = samo.param_groups(model, weight_decay=0.1)
    opt = samo.AdamW(groups, lr=torch.tensor(0.25), betas=(0.5, 0.75))
    torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5)
    opt.param_groups[0]["eps"] = float("inf")
    again_opt = samo.AdamW(samo.param_groups(again, weight_decay=0.7), lr=1.0)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    second, first = again_opt.param_groups
    assert torch.equal(first["lr"], torch.tensor(0.125))
    assert torch.equal(first["initial_lr"], torch.tensor(0.25))
    assert (first["betas"], first["weight_decay"], second["weight_decay"]) == ((0.5, 0.75), 0.1, 0)
    assert second["eps"] == float("inf")
    assert [len(group["params"]) for group in (first, second)] == [3, 4]
    assert first["lr"] is not second["lr"]  # a scheduler may change one in place


def test_groups_are_matched_by_name_and_may_be_cut_otherwise(tmp_path: Path) -> None:
    model, again = compressed(), compressed(seed=1)
    opt = samo.AdamW(model.parameters(), lr=0.05)
    opt.add_param_group({"params": [], "lr": torch.tensor(2.0)})
    again_opt = samo.AdamW([{"params": [p]} for p in [*again.parameters()][::-1]], lr=1.0)
    again_opt.add_param_group({"params": [], "lr": 3.0})
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert [group["lr"] for group in again_opt.param_groups] == [*[0.05] * 7, 3.0]
    step(model, opt, 1)
    step(again, again_opt, 1)
    assert_same(state_of(again), state_of(model))


def test_a_checkpoint_holds_kept_values_and_each_tensor_once(tmp_path: Path) -> None:
    model = compressed()
    samo.save(tmp_path, model)
    found = checkpoint.read_manifest(tmp_path)
    specs = {n: s.shape for n, s in SavedTensors(tmp_path, found, "weights").specs.items()}
    expected = {name: tuple(value.shape) for name, value in net().state_dict().items()}
    del expected["head.weight"]
    assert specs == expected | {"body.weight": (36,), "still.weight": (72,)}
    assert found.tied == {"head.weight": "embed.weight"}
    rest = 84 + 12 + 24 + 1
    assert (found.num_params, found.kept) == (rest + 144 + 144, rest + 36 + 72)
    assert (found.is_compressed, found.dtype) == (True, "float32")
    assert found.num_bytes == sum(f.stat().st_size for f in (tmp_path / found.data).iterdir())


def test_weights_that_are_not_contiguous_come_back(tmp_path: Path) -> None:
    model, again = (nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    again.load_state_dict(model.state_dict())
    for m in (model, again):
        samo.compress_(m, samo.prune(m, 0.5))
    with torch.no_grad():
        again.weight.mul_(2)
    samo.save(tmp_path, model)
    samo.load(tmp_path, again)
    assert torch.equal(model.weight, again.weight)
    assert again.weight.is_contiguous(memory_format=torch.channels_last)


def test_loading_is_seen_by_autograd_and_is_no_edit_by_hand(tmp_path: Path) -> None:
    model = compressed(torch.bfloat16)
    opt = samo.AdamW(model.parameters(), lr=0.05)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    loss = model(torch.arange(7)).float().sum()
    samo.load(tmp_path, model, opt)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    before = state_of(model)
    model.eval()(torch.arange(7))  # would round the values if it took the load for an edit
    assert_same(state_of(model), before)


def test_values_written_by_hand_are_saved_and_dense_weights_follow_a_load(tmp_path: Path) -> None:
    model, again = compressed(torch.bfloat16), compressed(torch.bfloat16, seed=1)
    step(model, OPTIMIZERS["SGD"](model), 0)
    with torch.no_grad():
        model.body.weight.mul_(2)
    samo.save(tmp_path, model)
    again(torch.arange(7))
    held = again.body.weight
    samo.load(tmp_path, again)
    assert torch.equal(held, model.body.weight)  # also for compiled code, which does not ask
    with pytest.warns(UserWarning, match="written to pruned entries"):
        model.body.weight = nn.Parameter(torch.ones(12, 12))
    samo.save(tmp_path, model)
    samo.load(tmp_path, again)
    assert int(again.body.weight.sum()) == 36


# Extra


def test_extra_comes_back(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "step": 12,
        "name": "a '\u2713' \ud800",
        "best": float("inf"),
        "tiny": 5e-324,
        "loss": [0.1, -0.0, None, True],
        "nested": {"$float": {"a": [1]}},
        "tuples": (1, (2, 3)),
        "big": 2**100,
        "$odd/name": {},
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "strided": torch.arange(6).view(2, 3).t(),
        "empty": torch.zeros(0, 3),
    }
    samo.save(tmp_path, nn.Linear(2, 2), extra=extra)
    found = samo.load(tmp_path, nn.Linear(2, 2))
    extra["tuples"] = [1, [2, 3]]
    assert {name: found[name] for name in extra if not isinstance(extra[name], Tensor)} == {
        name: value for name, value in extra.items() if not isinstance(value, Tensor)
    }
    assert str(found["loss"][1]) == "-0.0"
    for name, value in extra.items():
        if isinstance(value, Tensor):
            assert_same(found[name], value)
    manifest = checkpoint.read_manifest(tmp_path)
    assert set(manifest.extra) | set(manifest.extra_tensors) == set(extra)
    assert sorted(manifest.extra_tensors) == ["empty", "rng", "scalar", "strided"]


def test_what_is_loaded_is_not_a_window_on_the_file(tmp_path: Path) -> None:
    model, again = nn.Linear(50, 50), nn.Linear(50, 50)
    opts = [torch.optim.SGD(m.parameters(), momentum=0.9, lr=0.1) for m in (model, again)]
    model(torch.ones(1, 50)).sum().backward()
    opts[0].step()
    samo.save(tmp_path, model, opts[0], extra={"a": torch.ones(1000)})
    found = samo.load(tmp_path, again, opts[1])
    for file in tmp_path.glob("data-*/*"):
        file.write_bytes(bytes(file.stat().st_size))
    assert_same(opts[1].state_dict(), opts[0].state_dict())
    assert torch.equal(found["a"], torch.ones(1000))


@pytest.mark.parametrize("extra", [{"a": {1, 2}}, {"a": [torch.ones(2)]}, {3: 4}], ids=str)
def test_extra_that_no_checkpoint_holds_is_refused(extra: dict[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extra.* that a checkpoint cannot hold"):
        samo.save(tmp_path / "new", nn.Linear(2, 2), extra=extra)
    assert not (tmp_path / "new").exists()


def test_a_manifest_that_would_be_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_BYTES", 2000)
    with pytest.raises(
        ValueError, match=r"would have .* bytes, at most 2,000 are allowed; give long"
    ):
        samo.save(tmp_path / "new", nn.Linear(2, 2), extra={"a": list(range(1000))})
    assert not (tmp_path / "new").exists()


# Shards


def test_much_is_split_into_files_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "SHARD_BYTES", 20)
    model, again = compressed(torch.bfloat16), compressed(torch.bfloat16, seed=1)
    opt, again_opt = (samo.AdamW(m.parameters(), lr=0.05) for m in (model, again))
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    found = checkpoint.read_manifest(tmp_path)
    assert list(found.files_of("weights"))[:2] == [f"weights-0000{i}.safetensors" for i in (1, 2)]
    assert list(found.files_of("masks")) == [f"masks-0000{i}.safetensors" for i in (1, 2)]
    samo.load(tmp_path, again, again_opt)
    assert_same(state_of(again, again_opt), state_of(model, opt))
    assert samo.load_masks(tmp_path) == masks(net())


def test_one_tensor_is_copied_to_the_host_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "SHARD_BYTES", 2000)
    monkeypatch.setattr(tensors, "_CHUNK_BYTES", 64)
    copies: list[weakref.ref[Any]] = []

    def watched(tensor: Tensor) -> Tensor:
        assert not any(reference() is not None for reference in copies)
        copy = host_bytes(tensor).clone()
        copies.append(weakref.ref(copy))
        return copy

    host_bytes = safetensors_io.host_bytes
    given = {f"t{i:02}": torch.full((100,), float(i)) for i in range(12)}
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_io, "host_bytes", watched)
        files = write_tensors(tmp_path, "weights", given)
    assert list(files) == [f"weights-0000{i}.safetensors" for i in (1, 2, 3)]
    assert len(copies) == 12
    assert_same({n: v for file in files for n, v in load_file(tmp_path / file).items()}, given)


def test_a_file_is_what_safetensors_itself_would_write(tmp_path: Path) -> None:
    given = {
        "b": torch.randn(3, 4),
        "a": torch.randn(2, 5, dtype=torch.float64),
        "\u2713": torch.arange(3, dtype=torch.int8),
        "view": torch.randn(6, 6)[1::2, ::3],
        "neg": torch._neg_view(torch.ones(3)),
        "conj": torch.tensor([1 + 2j]).conj(),
        "one": torch.tensor(True),
        "none": torch.zeros(0, 7),
        **{name: torch.ones(3).to(dtype) for name, dtype in safetensors_io.DTYPES.items()},
    }
    write_tensors(tmp_path, "weights", given)
    assert_same(load_file(tmp_path / "weights.safetensors"), given)
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert all(file.get_tensor(name).data_ptr() % 8 == 0 for name in ("a", "conj"))


# Masks and dense models


def test_masks_load_from_a_checkpoint(tmp_path: Path) -> None:
    samo.save(tmp_path, compressed())
    assert samo.load_masks(tmp_path) == masks(net())
    assert samo.Masks.load(next(tmp_path.glob("data-*/masks.safetensors"))) == masks(net())
    model = net()
    samo.compress_(model, samo.Masks({}))
    samo.save(tmp_path, model)
    assert samo.load_masks(str(tmp_path)) == samo.Masks({})


def test_masks_of_a_dense_or_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    samo.save(tmp_path, net())
    with pytest.raises(MaskError, match="has no masks: it was saved from a dense model; load it"):
        samo.load_masks(tmp_path)
    samo.save(tmp_path, compressed())
    file = next(tmp_path.glob("data-*/masks.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"masks\.safetensors' is damaged"):
        samo.load_masks(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compressed_checkpoint_fills_a_dense_model_with_zeros_between(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, dense = compressed(torch.bfloat16), net(1).to(dtype)
    opt = samo.AdamW(model.parameters(), lr=0.05)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt, extra={"step": 1})
    version = dense.body.weight._version
    assert samo.load(tmp_path, dense) == {"step": 1}
    for name, value in samo.dense_state_dict(model).items():
        assert torch.equal(dense.state_dict()[name], value.to(dense.state_dict()[name].dtype)), name
    assert dense.head.weight is dense.embed.weight
    assert dense.body.weight._version > version
    assert int((dense.body.weight == 0).sum()) == 108


def test_dense_and_compressed_do_not_mix(tmp_path: Path) -> None:
    model, dense = compressed(), net()
    samo.save(tmp_path / "compressed", model, OPTIMIZERS["SGD"](model))
    opt = torch.optim.SGD(dense.parameters(), momentum=0.9)
    message = r"is not compressed; call samo.compress_\(model, samo.load_masks\('.*'\)\) first"
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path / "compressed", dense, opt)
    samo.save(tmp_path / "dense", dense)
    with pytest.raises(CheckpointError, match="from a dense model and this one is compressed"):
        samo.load(tmp_path / "dense", model)


# What does not fit changes nothing


def rename(model: Net) -> None:
    model.boddy = model.body
    del model.body


def untie(model: Net) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def tie(model: Net) -> None:
    model.extra = nn.Linear(12, 7, bias=False)
    model.extra.weight = model.embed.weight


def add(model: Net) -> None:
    model.later = nn.Linear(2, 2)


MISFITS: list[tuple[Callable[[Net], Any], str]] = [
    (lambda m: setattr(m, "body", nn.Linear(12, 13)), r"'body.weight' has shape \(12, 12\) in the"),
    (rename, r"lacks 2 of the model's 11 tensors, the first is 'boddy.weight' \(did you mean"),
    (add, "lacks 2 of the model's 13 tensors, the first is 'later.weight'"),
    (untie, "lacks 1 of the model's 12 tensors, the first is 'head.weight'"),
    (
        lambda m: m.body.double(),
        "'body.weight' is torch.float32 in the checkpoint and torch.float64",
    ),
    (
        lambda m: setattr(m, "seen", torch.tensor(3.0)),
        "'seen' is torch.int64 in the checkpoint and",
    ),
    (tie, "'extra.weight' is tied to 'nothing' in the checkpoint and to 'embed.weight' in"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS)
def test_another_model_is_refused(
    change: Callable[[Net], Any], message: str, tmp_path: Path
) -> None:
    samo.save(tmp_path, net())
    model = net(1)
    change(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=f"does not fit: .*{message}"):
        samo.load(tmp_path, model)
    assert_same(model.state_dict(), before)


def test_a_model_with_less_is_refused(tmp_path: Path) -> None:
    model = net()
    add(model)
    samo.save(tmp_path, model)
    with pytest.raises(
        CheckpointError, match="2 of its 13 tensors are not in the model, the first"
    ):
        samo.load(tmp_path, net())


MOVED = {"same count": 0.75, "more kept": 0.4}


def other_masks(sparsity: float) -> samo.Masks:
    rules = {"body.weight": sparsity, "still.weight": 0.5}
    return samo.prune(net(), rules=rules, sparsity=0.5, method="random", seed=3)


@pytest.mark.parametrize("sparsity", MOVED.values(), ids=MOVED)
@pytest.mark.parametrize("kind", ["samo.AdamW", "ages", "lean", "Adam", "Adafactor"])
def test_a_model_takes_the_masks_of_a_checkpoint(
    kind: str, sparsity: float, tmp_path: Path
) -> None:
    """Masks that moved in training, as those of DynamicSparse, come back into a new model."""
    types: dict[str, Any] = LEAN if kind == "lean" else {"dtype": torch.bfloat16}
    build = OPTIMIZERS.get(kind, lambda m: samo.AdamW(m.parameters(), lr=0.05, state="lean"))
    model, again = compressed(given=other_masks(sparsity), **types), compressed(seed=1, **types)
    opt, again_opt = build(model), build(again)
    step(model, opt, 0)
    step(again, again_opt, 5)
    values = dict(again.named_parameters())["body.weight"]
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert dict(again.named_parameters())["body.weight"] is values
    assert_same(state_of(again, again_opt), state_of(model, opt))
    step(model, opt, 1)
    step(again, again_opt, 1)
    assert_same(state_of(again, again_opt), state_of(model, opt))


def test_other_masks_are_refused_while_a_forgotten_optimizer_has_state(tmp_path: Path) -> None:
    samo.save(tmp_path, compressed(given=other_masks(0.75)))
    model = compressed()
    opt = OPTIMIZERS["SGD"](model)
    step(model, opt, 0)
    before = state_of(model, opt)
    with pytest.raises(
        CheckpointError,
        match=r"another mask of 'body.weight', and an optimizer \(SGD\) that was not",
    ):
        samo.load(tmp_path, model)
    assert_same(state_of(model, opt), before)
    opt.state.clear()
    samo.load(tmp_path, model)
    step(model, opt, 1)


def test_masks_of_other_weights_are_refused(tmp_path: Path) -> None:
    samo.save(tmp_path, compressed())
    model = net()
    samo.compress_(model, samo.Masks({"body.weight": masks(model)["body.weight"]}))
    with pytest.raises(
        CheckpointError,
        match=r"mask of 'still.weight' is Mask\(.* and the model's None; compress the",
    ):
        samo.load(tmp_path, model)


def test_a_model_may_compute_in_another_type_but_not_keep_its_values_in_one(tmp_path: Path) -> None:
    def build(dtype: torch.dtype, seed: int) -> Net:
        model = net(seed)
        model.still.requires_grad_(True)  # a frozen weight without values is cast
        return samo.compress_(model, masks(net()), dtype=dtype)  # type: ignore[return-value]

    model, again = build(torch.float32, 0), build(torch.bfloat16, 1)
    samo.save(tmp_path, model)
    samo.load(tmp_path, again)
    assert_same(again.state_dict(), model.state_dict())
    assert torch.equal(again.body.weight, model.body.weight.bfloat16())
    samo.save(tmp_path, compressed(**LEAN))
    with pytest.raises(CheckpointError, match=r"is torch.bfloat16 in the checkpoint and torch.flo"):
        samo.load(tmp_path, compressed(torch.bfloat16))


OTHERS: list[tuple[Build, str]] = [
    (OPTIMIZERS["AdamW fused"], "the state of a samo.AdamW, not of a torch.optim.AdamW; build the"),
    (
        lambda m: samo.AdamW(m.parameters()),
        "'gain' and 'embed.weight' are in one group .* saved with weight_decay=0.0 and 0.1; build",
    ),
    (
        lambda m: samo.AdamW([p for n, p in m.named_parameters() if n != "embed.weight"]),
        "'embed.weight' is in the checkpoint alone; build the optimizer on the same",
    ),
]


@pytest.mark.parametrize(("build", "message"), OTHERS)
def test_another_optimizer_is_refused(build: Build, message: str, tmp_path: Path) -> None:
    model = compressed()
    opt = samo.AdamW(samo.param_groups(model, weight_decay=0.1), lr=0.05)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    again = compressed(seed=1)
    again_opt = build(again)
    before = state_of(again, again_opt)
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path, again, again_opt)
    assert_same(state_of(again, again_opt), before)


def test_an_optimizer_may_be_left_out_but_not_added(tmp_path: Path) -> None:
    model, again = compressed(), compressed(seed=1)
    opt = OPTIMIZERS["samo.AdamW"](model)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt, scaler=torch.amp.GradScaler("cpu"))
    samo.load(tmp_path, again)
    assert_same(state_of(again), state_of(model))
    samo.save(tmp_path, model)
    with pytest.raises(CheckpointError, match="was saved without an optimizer; load it with opt="):
        samo.load(tmp_path, model, opt)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = net()
    early = torch.optim.SGD(model.parameters())
    samo.compress_(model, masks(model))
    message = r"group 0 of the optimizer has a tensor of shape .* build it on model.parameters\(\)"
    for opt in (OPTIMIZERS["SGD"](compressed()), early):
        with pytest.raises(CheckpointError, match=message):
            samo.save(tmp_path, model, opt)


class Global(torch.optim.SGD):
    """An optimizer that keeps something of its own."""

    norm: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "norm": self.norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norm = state["norm"]
        super().load_state_dict(state)


def test_what_an_optimizer_has_for_all_parameters_comes_back(tmp_path: Path) -> None:
    model = net()
    opt, again = Global(model.parameters()), Global(model.parameters())
    opt.norm = [3.0, torch.tensor([1.0, 2.0])]
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, model, again)
    assert_same(again.norm, opt.norm)


def test_optimizer_state_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters())
    opt.state["all"] = 3  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"belongs to none of its parameters \('all'\)"):
        samo.save(tmp_path, model, opt)
    opt.state.clear()
    opt.state[model.weight]["history"] = {1, 2}
    with pytest.raises(TypeError, match=r"^weight/history is a set that a checkpoint cannot hold"):
        samo.save(tmp_path, model, opt)


def test_names_that_run_together_stay_apart(tmp_path: Path) -> None:
    model, again = (
        nn.ParameterDict({"a": torch.ones(2), "a/b": torch.ones(2), "$float": torch.ones(2)})
        for _ in range(2)
    )
    opt, again_opt = (torch.optim.SGD(m.parameters()) for m in (model, again))
    opt.state[model["a"]] = {"b/c": torch.tensor(1.0), "b": {"c": torch.tensor(2.0)}}
    opt.state[model["a/b"]] = {"c": torch.tensor(3.0)}
    opt.state[model["$float"]] = {"$tensor": "nan"}
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert_same(again_opt.state_dict()["state"], opt.state_dict()["state"])


def test_a_scaler_is_given_exactly_if_one_was_saved(tmp_path: Path) -> None:
    model = compressed(torch.float16)
    opt = OPTIMIZERS["samo.AdamW"](model)
    scaler, again = (torch.amp.GradScaler("cpu", init_scale=s) for s in (8.0, 16.0))
    samo.save(tmp_path / "with", model, opt, scaler=scaler)
    samo.save(tmp_path / "without", model, opt)
    with pytest.raises(CheckpointError, match="the state of a loss scaler, without which"):
        samo.load(tmp_path / "with", model, opt)
    with pytest.raises(CheckpointError, match="saved without a loss scaler; load it with scaler"):
        samo.load(tmp_path / "without", model, opt, scaler=scaler)
    with pytest.raises(CheckpointError, match=r"of another loss scaler, {'scale': 8.0"):
        samo.load(tmp_path / "with", model, opt, scaler=torch.amp.GradScaler("cpu", enabled=False))
    samo.load(tmp_path / "with", model, opt, scaler=again)
    assert again.state_dict()["scale"] == 8.0


# What cannot be saved


def test_arguments_in_the_wrong_place_are_refused(tmp_path: Path) -> None:
    message = "the model must be a torch.nn.Module, got str; the folder comes first, then the model"
    with pytest.raises(TypeError, match=message):
        samo.save(tmp_path, "model")  # type: ignore[arg-type]
    message = r"opt must be a torch.optim.Optimizer or several of them, got GradScaler"
    with pytest.raises(TypeError, match=message):
        samo.save(tmp_path, compressed(), torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]


ODD = [
    ("odd", torch.zeros(2, device="meta"), "'odd' has no values yet; save the model once it has"),
    ("odd", torch.eye(2).to_sparse(), "'odd' is a Tensor of layout torch.sparse_coo; a checkpoint"),
    ("odd", torch.zeros(2, dtype=torch.complex128), "'odd' is torch.complex128, which no safetens"),
    ("__metadata__", torch.ones(1), "'__metadata__' is taken by the file format; give"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), ODD)
def test_a_tensor_that_no_file_holds_is_refused(
    name: str, tensor: Tensor, message: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=message):
        samo.save(tmp_path / "new", model, extra={name: tensor})
    model.register_buffer(name, tensor)
    with pytest.raises(CheckpointError, match=message):
        samo.save(tmp_path / "new", model)
    assert not (tmp_path / "new").exists()


class Counting(nn.Linear):
    """A module that keeps something beside its tensors."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_state_of_a_module_that_is_no_tensor_is_warned_about(tmp_path: Path) -> None:
    message = r"module '0' \(Counting\) has state beside its tensors .* give it in extra="
    with pytest.warns(UserWarning, match=message) as caught:
        samo.save(tmp_path, nn.Sequential(Counting(2, 2)))
    assert caught[0].filename == __file__


def test_a_model_without_tensors_is_saved(tmp_path: Path) -> None:
    samo.save(tmp_path, nn.Sequential(), extra={"a": 1})
    assert samo.load(tmp_path, nn.Sequential()) == {"a": 1}
    assert checkpoint.read_manifest(tmp_path).num_params == 0
