"""Models and large updates on a CUDA device; tests/kernels runs the kernels there too."""

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.async_compile import shutdown_compile_workers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.autograd import DeviceType

import samo
from samo.core.shards import any_rank
from samo.kernels import AdamWUpdate, choose, operators
from samo.mask.mask import Mask
from tests.kernels.cases import SETTINGS
from tests.meters import Experts, assert_same, ignores_dynamo, small_gpt, tokens

pytestmark = pytest.mark.gpu


def batch() -> Tensor:
    return tokens().cuda()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make it an error to wait for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_kernels() -> list[CachingAutotuner]:
    # Not isinstance, to which deprecated objects of torch answer with a warning.
    return [found for found in gc.get_objects() if issubclass(type(found), CachingAutotuner)]


def compressed_gpt(
    dtype: torch.dtype, weights: Any = "resident", **changes: Any
) -> tuple[nn.Module, samo.Masks]:
    model = small_gpt(**changes).cuda()
    masks = samo.prune(model, 0.9)
    samo.compress_(model, masks, dtype=dtype, weights=weights)
    return model, masks


def is_masked(model: nn.Module, masks: samo.Masks) -> bool:
    """Whether the dense weights of a model are 0 where they are pruned."""
    for name, mask in masks.items():
        module, _, attribute = name.rpartition(".")
        weight = getattr(model.get_submodule(module), attribute)
        if weight.shape != mask.shape or weight[~mask.to_bool()].any():
            return False
    return True


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> list[float]:
    ids = batch()
    losses = []
    for _ in range(steps):
        loss = model(ids, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_whole_step_never_waits_for_the_device() -> None:
    model, _ = compressed_gpt(torch.bfloat16)
    rate = torch.tensor(1e-2, device="cuda")
    opt = samo.AdamW(samo.param_groups(model, lr=rate, weight_decay=0.1))
    ids = batch()
    for step in range(4):
        with no_waiting() if step else nullcontext():  # what is compiled first may wait
            for _ in range(2):
                model(ids, ids).backward()
            opt.step()
            opt.zero_grad()


def test_launches_do_not_grow_with_the_number_of_layers() -> None:
    counts = []
    for layers in (1, 4):
        model, _ = compressed_gpt(torch.bfloat16, num_layers=layers)
        opt = samo.AdamW(samo.param_groups(model, lr=1e-2, weight_decay=0.1))
        train(model, opt, 2)
        ids = batch()
        model(ids, ids).backward()
        torch.cuda.synchronize()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            opt.step()
            torch.cuda.synchronize()
        names = [e.name for e in profile.events() if e.device_type == DeviceType.CUDA]
        # A table is sent again if a gradient lies elsewhere than in the last step.
        counts.append(sum(not name.startswith("Mem") for name in names))
    assert 0 < counts[0] == counts[1] < 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_everything_runs_on_the_device_of_its_tensors_not_on_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("cuda:1"):
        dense = torch.randn(100, 300)
        mask = Mask.from_bool(torch.rand(100, 300) < 0.1)
        flag = torch.tensor(True)
    values = operators.compress(dense, mask.packed, mask.kept, torch.bfloat16)
    again = operators.expand(values, mask.packed, [100, 300], torch.float32, None)
    assert torch.equal(again, dense.bfloat16().float() * mask.to_bool())
    sent: list[torch.device] = []
    monkeypatch.setattr(dist, "all_reduce", lambda flag, *args, **options: sent.append(flag.device))
    group: Any = None
    assert bool(any_rank(flag, group, "cuda"))
    assert sent == [flag.device]


@pytest.mark.slow
def test_offsets_pass_two_to_the_31() -> None:
    """4.3 GB for each dense tensor, and entries past the last one that 32 bits can count."""
    numel = 2**31 + 2**20 + 3
    words = torch.zeros(2 * -(-numel // 64), dtype=torch.int32, device="cuda")
    words[:: 2**12] = 1  # one weight of 131,072, and the last one
    words[numel // 32] += 1 << (numel % 32 - 1)
    mask = Mask((numel,), words)
    places = torch.cat(
        [torch.arange(0, numel, 2**17, device="cuda"), torch.tensor([numel - 1], device="cuda")]
    ).unique()
    assert mask.kept == places.numel()
    kernels = choose(torch.device("cuda"))
    dense = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    dense[places] = (torch.rand(mask.kept, device="cuda") + 1).bfloat16()
    out = torch.empty(mask.kept, dtype=torch.bfloat16, device="cuda")
    kernels.compress_(dense, mask, out)
    assert torch.equal(out, dense[places])
    param = out.float()
    zeros = [torch.zeros(mask.kept, device="cuda") for _ in range(2)]
    step = torch.tensor(0.0, device="cuda")
    grad = torch.ones_like(out)
    update = AdamWUpdate(param, None, grad, zeros[0], zeros[1], step, 0.5, 0.0, dense, mask)
    kernels.adamw_([update], SETTINGS, None)
    torch.testing.assert_close(param, out.float() - 0.5, rtol=0, atol=1e-5)
    assert torch.equal(dense[places], param.bfloat16())
    assert int(dense.count_nonzero()) == int(param.bfloat16().count_nonzero())
    kernels.expand_(out, mask, dense)
    assert torch.equal(dense[places], out)
    assert int(dense.count_nonzero()) == mask.kept


def test_a_compressed_model_moves_to_the_device_with_all_its_state() -> None:
    model = small_gpt()
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    ids = tokens()
    model(ids, ids).backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.cuda()
    after = [param.grad for param in model.parameters()]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, after) if b is not None)
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    losses = train(model, samo.AdamW(model.parameters(), lr=1e-2), 20)
    assert losses[-1] < losses[0]


def test_dense_weights_of_the_host_are_taken_on_the_device() -> None:
    dense = nn.Sequential(nn.Linear(64, 64))
    model = copy.deepcopy(dense).cuda()
    samo.compress_(model, samo.prune(model, 0.5))
    kept = model[0].weight != 0
    for take in (
        lambda: model.load_state_dict(dense.state_dict()),
        lambda: setattr(model[0].weight, "data", dense[0].weight.data),
    ):
        with torch.no_grad():
            model[0].weight.zero_()
        with pytest.warns(UserWarning, match="written to pruned entries"):
            take()
        assert torch.equal(model[0].weight, dense[0].weight.cuda() * kept)


def test_streamed_experts_are_resident_ones_wherever_their_values_begin() -> None:
    """Addresses of an expert's values, and of its part of the mask, are aligned to nothing."""
    torch.manual_seed(0)
    start = Experts(4, 64).cuda()
    masks = samo.prune(start, 0.9, rules={"experts.*": 0.9})
    x = torch.randn(50, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for weights in ("resident", "streamed"):
        model = copy.deepcopy(start)
        samo.compress_(model, masks, dtype=torch.bfloat16, weights=weights)  # type: ignore[arg-type]
        out = model(x)
        out.float().square().sum().backward()
        found.append([out.detach(), *(param.grad for param in model.parameters())])
    assert_same(*found)


def test_a_torch_optimizer_works_on_the_device() -> None:
    model, _ = compressed_gpt(torch.bfloat16)
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), 20)
    assert losses[-1] < 0.7 * losses[0]


def test_backward_holds_no_more_than_one_dense_gradient() -> None:
    layers = 12
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(layers))).cuda()
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    x = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)
    model(x).float().sum().backward()
    model.zero_grad()
    one = 2048 * 2048 * 2
    kept = sum(4 * values.numel() for values in model.parameters())
    loss = model(x).float().sum()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - start < one + kept + 2**20  # and small change


def test_the_ledger_agrees_with_the_allocator() -> None:
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters())
    x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    model(x).float().sum().backward()
    opt.step()
    del x
    held = torch.cuda.memory_allocated() - start
    told = samo.ledger(model, opt).measured_bytes
    assert told <= held <= 1.01 * told, (told, held)  # the allocator rounds to 512 bytes


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_blocks_compiled_by_inductor_train(weights: Any) -> None:
    model, masks = compressed_gpt(torch.bfloat16, weights)
    plain = copy.deepcopy(model)
    shutdown_compile_workers()  # those of earlier tests lack the setting
    operators.launch_statically()
    before = compiled_kernels()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile()
    losses = []
    for each in (model, plain):
        torch.manual_seed(0)  # for the same batch
        losses.append(train(each, samo.AdamW(each.parameters(), lr=1e-2), 5))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.02, atol=0)
    assert is_masked(model, masks)
    found = [kernel for kernel in compiled_kernels() if kernel not in before]
    launchers = [launcher for kernel in found for launcher in kernel.launchers]
    assert launchers
    assert all(getattr(launcher, "_is_static", False) for launcher in launchers)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_without_waiting_for_the_device(bad: float) -> None:
    model, _ = compressed_gpt(torch.bfloat16)
    opt = samo.AdamW(model.parameters(), lr=0.1)
    train(model, opt, 2)
    before = copy.deepcopy(dict(model.state_dict()))
    steps = [int(state["step"]) for state in opt.state.values()]
    ids = batch()
    model(ids, ids).backward()
    values = next(model.parameters())
    assert values.grad is not None
    values.grad.view(-1)[3] = bad
    with no_waiting():
        opt.step()
    assert opt.skipped_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [int(state["step"]) for state in opt.state.values()] == steps
    opt.zero_grad()
    train(model, opt, 1)
    assert opt.skipped_steps == 1


@pytest.mark.parametrize("is_aside", [True, False], ids=["side stream", "default stream"])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_forward_and_backward_in_a_cuda_graph_train_as_without(
    weights: Any, is_aside: bool
) -> None:
    eager, _ = compressed_gpt(torch.bfloat16, weights=weights)
    graphed = copy.deepcopy(eager)
    opts = [samo.AdamW(model.parameters(), lr=1e-3) for model in (eager, graphed)]
    ids = batch()
    side = torch.cuda.Stream() if is_aside else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # lazy initialisation must not be captured
            graphed(ids, ids).backward()
            graphed.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = graphed(ids, ids)
        loss.backward()
    for _ in range(5):
        expected = eager(ids, ids)
        expected.backward()
        graph.replay()
        assert torch.equal(loss, expected)
        for opt in opts:
            opt.step()
        opts[0].zero_grad()  # not of the graph's: its gradients stay where they are
    for ours, theirs in zip(graphed.parameters(), eager.parameters()):
        assert torch.equal(ours, theirs)
