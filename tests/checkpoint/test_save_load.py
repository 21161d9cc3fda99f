"""samo.save and samo.load: training resumes exactly, and what does not fit changes nothing."""

import copy
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
from samo.checkpoint import tensors
from samo.checkpoint.tensors import SavedTensors, write_tensors
from samo.errors import CheckpointError, MaskError
from samo.utils import safetensors_io

Build = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Pruned matrices, a tied head, a batch norm, a scalar, a frozen layer and kinds of buffers."""

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


def masks(model: nn.Module, **more: Any) -> samo.Masks:
    rules = {"body.weight": 0.75, "still.weight": 0.5}
    return samo.prune(model, rules=rules, sparsity=0.5, **more)


def compressed(
    dtype: torch.dtype = torch.float32, seed: int = 0, given: samo.Masks | None = None, **types: Any
) -> Net:
    model = net(seed)
    samo.compress_(model, given or masks(net()), dtype=dtype, kernels="reference", **types)
    return model


def adamw(params: Any, **settings: Any) -> Optimizer:
    settings = {"lr": 0.05, "kernels": "reference"} | settings
    return samo.AdamW(params.parameters() if isinstance(params, nn.Module) else params, **settings)


def step(model: nn.Module, opt: Optimizer, seed: int, scaler: Any = None) -> None:
    torch.manual_seed(seed)
    device = next(model.parameters()).device

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(torch.arange(7).to(device)).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()

    if isinstance(opt, torch.optim.LBFGS):
        opt.step(closure)
        return
    closure()
    opt.step() if scaler is None else scaler.step(opt)
    if scaler is not None:
        scaler.update()


def state_of(model: nn.Module, *opts: Optimizer) -> dict[str, Any]:
    """Return copies of all that training depends on."""
    return copy.deepcopy({**model.state_dict(), "opts": [opt.state_dict() for opt in opts]})


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


# Resuming


OPTIMIZERS: dict[str, Build] = {
    "samo.AdamW": lambda m: adamw(samo.param_groups(m, weight_decay=0.1)),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.named_parameters(), lr=torch.tensor(0.05)),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True, amsgrad=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.05, centered=True),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),  # lists of tensors
    "ages": lambda m: adamw(m, entry_steps=True),
    "lean": lambda m: adamw(m, state="lean"),
}
BF16, HALF = {"dtype": torch.bfloat16}, {"dtype": torch.float16}
NARROW = {"dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}
LEAN = {"dtype": torch.bfloat16, "value_dtype": torch.bfloat16}
CASES: list[tuple[str, dict[str, Any] | None]] = [
    *((kind, BF16) for kind in OPTIMIZERS if kind != "LBFGS"),
    *((kind, types) for kind in ("samo.AdamW", "lean") for types in (NARROW, LEAN)),
    *((kind, HALF) for kind in ("samo.AdamW", "SGD")),
    *((kind, {"dtype": torch.float64}) for kind in ("samo.AdamW", "SGD")),
    *((kind, None) for kind in ("SGD", "LBFGS")),  # a dense model
]


@pytest.mark.parametrize(("kind", "types"), CASES, ids=str)
def test_training_resumes_bit_for_bit(
    kind: str, types: dict[str, Any] | None, tmp_path: Path
) -> None:
    model, again = (net(i) if types is None else compressed(seed=i, **types) for i in (0, 1))
    opt, again_opt = OPTIMIZERS[kind](model), OPTIMIZERS[kind](again)
    scaler, again_scaler = (
        torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) if types is HALF else None
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
    if types is LEAN and kind == "lean":  # or a lost correction would not be noticed
        saved = SavedTensors(checkpoint.read_manifest(tmp_path / "a"), "optimizer")
        assert int(saved.read("body.weight/correction").count_nonzero()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["samo.AdamW", "Adam", "AdamW fused"])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids=str)
def test_a_checkpoint_goes_to_the_device_of_the_model(
    kind: str, devices: tuple[str, str], tmp_path: Path
) -> None:
    model, again = (
        samo.compress_(net(i), masks(net()), dtype=torch.bfloat16).to(device)
        for i, device in enumerate(devices)
    )
    builds: dict[str, Build] = {
        **OPTIMIZERS,
        "samo.AdamW": lambda m: samo.AdamW(m.parameters()),
        # A learning rate that is a tensor stays on the host.
        "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.05), foreach=False),
    }
    opt, again_opt = builds[kind](model), builds[kind](again)
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


class Global(torch.optim.SGD):
    """An optimizer that keeps something of its own."""

    norm: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "norm": self.norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norm = state["norm"]
        super().load_state_dict(state)


def test_odd_optimizer_state_comes_back(tmp_path: Path) -> None:
    model, again = (
        nn.ParameterDict({n: torch.ones(2).bfloat16() for n in ("a", "a/b", "$float")})
        for _ in range(2)
    )
    opt, again_opt = (Global(m.parameters()) for m in (model, again))
    opt.norm = [3.0, torch.tensor([1.0, float("nan")])]
    opt.state[model["a"]] = {"b/c": torch.tensor(1.0), "b": {"c": torch.tensor(2.0)}}
    opt.state[model["a/b"]] = {"c": torch.tensor(3.0)}
    # torch's own load_state_dict would round what is fp32 here to the parameter's type.
    opt.state[model["$float"]] = {"$tensor": "nan", "momentum_buffer": torch.randn(2)}
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert_same(again_opt.state_dict()["state"], opt.state_dict()["state"])
    assert_same(again_opt.norm, opt.norm)
    opt.state[model["a"]] = {"history": {1, 2}}
    with pytest.raises(TypeError, match=r"^a/history is a set, which a checkpoint cannot hold"):
        samo.save(tmp_path, model, opt)
    opt.state.clear()
    opt.state["all"] = 3  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"has state of 'all', not a parameter"):
        samo.save(tmp_path, model, opt)


def test_settings_of_groups_come_back_with_those_of_a_scheduler(tmp_path: Path) -> None:
    model, again = compressed(), compressed()
    groups = samo.param_groups(model, weight_decay=0.1)
    opt = samo.AdamW(groups, lr=torch.tensor(0.25), betas=(0.5, 0.75))
    torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5)
    again_opt = samo.AdamW(samo.param_groups(again, weight_decay=0.7), lr=1.0)
    step(again, again_opt, 0)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert not again_opt.state  # the saved one had made no step
    second, first = again_opt.param_groups
    assert_same(first["lr"], torch.tensor(0.125))
    assert_same(first["initial_lr"], torch.tensor(0.25))
    assert (first["betas"], first["weight_decay"], second["weight_decay"]) == ((0.5, 0.75), 0.1, 0)
    assert [len(group["params"]) for group in (first, second)] == [3, 4]
    assert first["lr"] is not second["lr"]  # a scheduler may change one in place


def test_plain_settings_load_into_a_fused_optimizer(tmp_path: Path) -> None:
    model, again = net(), net(1)
    opt = torch.optim.AdamW(model.parameters())
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, other := torch.optim.AdamW(again.parameters(), fused=True))
    assert_same(other.state_dict(), opt.state_dict())


def test_groups_are_matched_by_name_and_may_be_cut_otherwise(tmp_path: Path) -> None:
    model, again = compressed(), compressed(seed=1)
    opt = adamw(model)
    opt.add_param_group({"params": [], "lr": torch.tensor(2.0)})
    again_opt = adamw([{"params": [p]} for p in [*again.parameters()][::-1]], lr=1.0)
    again_opt.add_param_group({"params": [], "lr": 3.0})
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    samo.load(tmp_path, again, again_opt)
    assert [group["lr"] for group in again_opt.param_groups] == [*[0.05] * 7, 3.0]
    step(model, opt, 1)
    step(again, again_opt, 1)
    assert_same(state_of(again), state_of(model))


# Weights and files


def test_a_checkpoint_holds_kept_values_and_each_tensor_once(tmp_path: Path) -> None:
    samo.save(tmp_path, compressed())
    found = checkpoint.read_manifest(tmp_path)
    specs = {n: s.shape for n, s in SavedTensors(found, "weights").specs.items()}
    expected = {name: tuple(value.shape) for name, value in net().state_dict().items()}
    del expected["head.weight"]
    assert specs == expected | {"body.weight": (36,), "still.weight": (72,)}
    assert found.tied == {"head.weight": "embed.weight"}
    rest = 84 + 12 + 24 + 1
    assert (found.num_params, found.kept) == (rest + 144 + 144, rest + 36 + 72)
    assert (found.is_compressed, found.dtype) == (True, "float32")
    assert found.num_bytes == sum(f.stat().st_size for f in found.data.iterdir())


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
    opt = adamw(model)
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


def test_extra_comes_back_and_is_no_window_on_the_file(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "step": 12,
        "name": "a '\u2713' \ud800",
        "best": float("inf"),
        "tiny": 5e-324,
        "loss": [0.1, -0.0, None, True],
        "nested": {"$float": {"a": [1, torch.ones(1000)]}},
        "tuples": (1, (2, 3)),
        "big": 2**100,
        "$odd/name": {},
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "strided": torch.arange(6).view(2, 3).t(),
        "empty": torch.zeros(0, 3),
    }
    model, again = nn.Linear(50, 50), nn.Linear(50, 50)
    samo.save(tmp_path, model, extra=extra)
    found = samo.load(tmp_path, again)
    for file in tmp_path.glob("data-*/*"):
        file.write_bytes(bytes(file.stat().st_size))
    assert_same(found, extra)
    assert_same(again.state_dict(), model.state_dict())
    assert str(found["loss"][1]) == "-0.0"
    manifest = checkpoint.read_manifest(tmp_path).extra
    assert (manifest["step"], manifest["rng"]) == (12, "extra/rng")
    with pytest.raises(TypeError, match=r"extra/a is a set, which a checkpoint cannot hold"):
        samo.save(tmp_path / "new", model, extra={"a": {1, 2}})
    assert not (tmp_path / "new").exists()


def test_one_tensor_is_copied_to_the_host_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        write_tensors(tmp_path / "file", given, {})
    assert len(copies) == 12
    assert_same(load_file(tmp_path / "file"), given)


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
    write_tensors(tmp_path / "file", given, {})
    assert_same(load_file(tmp_path / "file"), given)
    with safe_open(tmp_path / "file", "pt") as file:
        assert all(file.get_tensor(name).data_ptr() % 8 == 0 for name in ("a", "conj"))


# Masks and dense models


def test_masks_load_from_a_checkpoint(tmp_path: Path) -> None:
    samo.save(tmp_path, compressed())
    assert samo.load_masks(tmp_path) == masks(net())
    file = next(tmp_path.glob("data-*/masks.safetensors"))
    assert samo.Masks.load(file) == masks(net())
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"masks\.safetensors' is damaged"):
        samo.load_masks(tmp_path)
    model = compressed(given=masks(net(), method="random", seed=3))  # goes back to older masks
    opt = OPTIMIZERS["SGD"](model)
    step(model, opt, 0)
    samo.save(tmp_path, old := compressed(), old_opt := OPTIMIZERS["SGD"](old))
    samo.remap_(model, samo.load_masks(tmp_path), opt)
    samo.load(tmp_path, model, opt)
    assert_same(state_of(model, opt), state_of(old, old_opt))
    samo.save(tmp_path, samo.compress_(net(), samo.Masks({})))
    assert samo.load_masks(str(tmp_path)) == samo.Masks({})
    samo.save(tmp_path, net())
    with pytest.raises(MaskError, match="has no masks: it was saved from a dense model; name one"):
        samo.load_masks(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compressed_checkpoint_fills_a_dense_model_with_zeros_between(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, dense = compressed(torch.bfloat16), net(1).to(dtype)
    opt = adamw(model)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt, extra={"step": 1})
    version = dense.body.weight._version
    assert samo.load(tmp_path, dense) == {"step": 1}
    for name, value in samo.dense_state_dict(model).items():
        assert torch.equal(dense.state_dict()[name], value.to(dense.state_dict()[name].dtype)), name
    assert dense.head.weight is dense.embed.weight
    assert dense.body.weight._version > version
    assert int((dense.body.weight == 0).sum()) == 108


def test_a_second_optimizer_and_any_schedule_fit_into_extra(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any, Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        opt = torch.optim.AdamW(model[1].parameters())
        return model, opt, torch.optim.lr_scheduler.MultiStepLR(opt, [1, 3])

    model, opt, schedule = build()
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        schedule.step()
    samo.save(tmp_path, model, extra={"opt": opt.state_dict(), "lr": schedule.state_dict()})
    again, other, its_schedule = build()
    found = samo.load(tmp_path, again)
    other.load_state_dict(found["opt"])
    its_schedule.load_state_dict(found["lr"])
    for own in (schedule, its_schedule):
        own.step()
    assert schedule.get_last_lr() == its_schedule.get_last_lr() == [pytest.approx(1e-5)]
    assert_same(other.state_dict()["state"], opt.state_dict()["state"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_channels_last_training_resumes_bit_for_bit(make: Any, fused: bool, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        model = model.to(memory_format=torch.channels_last)
        samo.compress_(model, samo.prune(model, 0.5, skip="0.*"))
        more = {"momentum": 0.9} if make is torch.optim.SGD else {}
        return model, make(model.parameters(), lr=0.1, fused=fused, **more)

    def train(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    one, two = build(), build()
    train(*one)
    samo.save(tmp_path, *one)
    samo.load(tmp_path, *two)
    train(*one)
    train(*two)
    assert all(map(torch.equal, one[0].parameters(), two[0].parameters()))


def test_one_optimizer_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    opts: Any = [torch.optim.SGD(model.parameters(), lr=0.1)]
    with pytest.raises(TypeError, match="opt must be one optimizer, got list; put the state_dict"):
        samo.save(tmp_path, model, opts)


def test_a_checkpoint_of_compiled_code_has_the_names_of_the_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    samo.compress_(model, samo.prune(model, 0.5))
    samo.save(tmp_path, torch.compile(model, backend="eager"))
    other = nn.Sequential(nn.Linear(4, 4))
    samo.compress_(other, samo.load_masks(tmp_path))
    samo.load(tmp_path, other)
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_model_may_compute_in_another_type(tmp_path: Path) -> None:
    def build(dtype: torch.dtype, seed: int) -> Net:
        model = net(seed)
        model.still.requires_grad_(True)  # a frozen weight without values is cast
        return samo.compress_(model, masks(net()), dtype=dtype)  # type: ignore[return-value]

    model, again = build(torch.float32, 0), build(torch.bfloat16, 1)
    samo.save(tmp_path, model)
    samo.load(tmp_path, again)
    assert_same(again.state_dict(), model.state_dict())
    assert torch.equal(again.body.weight, model.body.weight.bfloat16())


# What does not fit changes nothing


def changed(change: Callable[[Net], Any]) -> Callable[[], Net]:
    def build() -> Net:
        model = net(1)
        change(model)
        return model

    return build


resized = changed(lambda m: setattr(m, "body", nn.Linear(12, 13)))
renamed = changed(lambda m: setattr(m, "boddy", m._modules.pop("body")))
untied = changed(lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(7, 12))))
tied = changed(lambda m: setattr(m, "extra", m.head))
added = changed(lambda m: setattr(m, "later", nn.Linear(2, 2)))
widened = changed(lambda m: m.body.double())
recounted = changed(lambda m: setattr(m, "seen", torch.tensor(3.0)))
others = lambda: compressed(given=masks(net(), method="random", seed=3))  # noqa: E731
one_mask = samo.Masks({"body.weight": masks(net())["body.weight"]})


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (net, resized, r"'body.weight' has shape \(12, 12\) in the checkpoint, \(13, 12\)"),
        (net, renamed, r"tensors that only the model has: 2, such as 'boddy.bias' \(did"),
        (net, untied, "tensors that only the model has: 1, such as 'head.weight'"),
        (added, net, "tensors that only the checkpoint has: 2, such as 'later"),
        (net, widened, "'body.weight' is torch.float32 in the checkp"),
        (net, recounted, "'seen' is torch.int64 in the checkpoint, torch.float32 in the"),
        (net, tied, "'extra.weight' is tied to 'nothing' in the checkpoint, to 'embed.we"),
        (net, compressed, "was saved from a dense model, and this one is compressed; load it"),
        (lambda: compressed(**LEAN), lambda: compressed(**BF16), "is torch.bfloat16 in the check"),
        (others, compressed, "its mask of 'body.weight' is not the model's; compress the model wi"),
        (compressed, lambda: compressed(given=one_mask), "its mask of 'still.weight' is not the"),
    ],
)
def test_another_model_is_refused(
    saved: Callable[[], Net], loaded: Callable[[], Net], message: str, tmp_path: Path
) -> None:
    samo.save(tmp_path, saved())
    model = loaded()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path, model)
    assert_same(state_of(model), before)


OTHERS: list[tuple[Build | None, Build, str]] = [
    (None, adamw, "it was saved without an optimizer; load it with opt=None"),
    (adamw, OPTIMIZERS["SGD"], "the state of a samo.AdamW, not of a torch.optim.SGD; build that"),
    (adamw, OPTIMIZERS["lean"], "build samo.AdamW with state='exact' and"),
    (OPTIMIZERS["lean"], adamw, "build samo.AdamW with state='lean' and"),
    (adamw, OPTIMIZERS["ages"], "AdamW with state='exact' and entry_steps=False"),
    (OPTIMIZERS["ages"], adamw, "AdamW with state='exact' and entry_steps=True"),
    (OPTIMIZERS["samo.AdamW"], adamw, "'gain' and 'embed.weight' are in one group but were saved"),
    (adamw, lambda m: adamw([*m.parameters()][1:]), "'gain' is only in the checkpoint; build the"),
]


@pytest.mark.parametrize(("saved", "build", "message"), OTHERS)
def test_another_optimizer_is_refused(
    saved: Build | None, build: Build, message: str, tmp_path: Path
) -> None:
    model, again = compressed(torch.bfloat16), compressed(torch.bfloat16, seed=1)
    opt = None if saved is None else saved(model)
    if opt is not None:
        step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    again_opt = build(again)
    before = state_of(again, again_opt)
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path, again, again_opt)
    assert_same(state_of(again, again_opt), before)
    samo.load(tmp_path, again)  # the weights alone go into any
    assert_same(state_of(again), state_of(model))


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = net()
    early = torch.optim.SGD(model.parameters())
    samo.compress_(model, masks(model))
    message = r"has a parameter of shape .* in group 0 that the model lacks; build it on model"
    for opt in (OPTIMIZERS["SGD"](compressed()), early):
        with pytest.raises(CheckpointError, match=message):
            samo.save(tmp_path, model, opt)
    samo.save(tmp_path, compressed(), None)
    with pytest.raises(CheckpointError, match=r"optimizer state of a compressed model; call"):
        samo.load(tmp_path, dense := net(), OPTIMIZERS["SGD"](dense))


def test_a_scaler_is_given_exactly_if_one_was_saved(tmp_path: Path) -> None:
    model = compressed(torch.float16)
    opt = adamw(model)
    scaler, again = (torch.amp.GradScaler("cpu", init_scale=s) for s in (8.0, 16.0))
    off = torch.amp.GradScaler("cpu", enabled=False)
    samo.save(tmp_path / "with", model, opt, scaler=scaler)
    samo.save(tmp_path / "without", model, opt)
    for name, given in (("with", None), ("without", scaler), ("with", off)):
        with pytest.raises(
            CheckpointError, match=r"saved with loss scaler .* give the same scaler"
        ):
            samo.load(tmp_path / name, model, opt, scaler=given)
    samo.load(tmp_path / "with", model)
    samo.load(tmp_path / "with", model, opt, scaler=again)
    assert again.state_dict()["scale"] == 8.0


# What cannot be saved


def test_a_tensor_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    for name, tensor, message in (
        ("odd", torch.zeros(2, device="meta"), "it has no values yet"),
        ("odd", torch.eye(2).to_sparse(), "it is a Tensor .torch.sparse_coo., not dense"),
        ("odd", torch.zeros(2, dtype=torch.complex128), "it is torch.complex128, which safetens"),
        ("__metadata__", torch.ones(1), "it is a name that safetensors reserves"),
    ):
        model = nn.Linear(2, 2)
        model.register_buffer(name, tensor)
        with pytest.raises(CheckpointError, match=f"a checkpoint cannot hold '{name}': {message}"):
            samo.save(tmp_path / "new", model)
    with pytest.raises(CheckpointError, match="a checkpoint cannot hold 'extra/odd': it has no v"):
        samo.save(tmp_path / "new", net(), extra={"odd": torch.zeros(2, device="meta")})
    with pytest.raises(TypeError, match="model must be a Module or a Pipeline, got str"):
        samo.save(tmp_path / "new", "model")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_state_of_a_module_that_is_no_tensor_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Linear, "get_extra_state", lambda self: 3)
    with pytest.warns(UserWarning, match=r"lacks the extra state of module '0' \(Linear") as found:
        samo.save(tmp_path, nn.Sequential(nn.Linear(2, 2)))
    assert found[0].filename == __file__


def test_a_model_without_tensors_is_saved(tmp_path: Path) -> None:
    samo.save(tmp_path, nn.Sequential(), extra={"a": 1})
    assert samo.load(tmp_path, nn.Sequential()) == {"a": 1}
    assert checkpoint.read_manifest(tmp_path).num_params == 0
