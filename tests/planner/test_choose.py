"""One layout for the hardware at hand: this machine, GPUs by name, and what is frozen."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import samo
from samo.errors import ConfigError
from samo.models.gpt import GPT, GPTConfig
from samo.planner.cost import step_time
from samo.planner.hardware import HARDWARE, Cluster, find_hardware, match_hardware
from samo.planner.local import this_hardware
from samo.planner.memory import Job, Layout, peak
from samo.planner.network import ENDS, named
from samo.planner.search import choose, layouts, search
from samo.utils.environment import hardware
from tests.planner.test_search import jobs, machines

JOB = Job(network=named("gpt3-2.7b").pruned(0.9), batch=4, context=2048)


@pytest.mark.parametrize(
    ("device", "memory", "name"),
    [
        ("NVIDIA H200", 150.1e9, "h200"),
        ("NVIDIA GH200 480GB", 150e9, "h200"),
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 85e9, "a100-80"),
        ("Tesla V100-SXM2-16GB", 16.9e9, "v100-16"),
        ("NVIDIA B200", 191e9, "b200"),
        ("NVIDIA GeForce RTX 3090 Ti", 25.3e9, "rtx3090"),
        ("NVIDIA GeForce RTX 4090", 25.3e9, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17e9, "laptop-8gb"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_torch_gives_it(device, memory, name) -> None:
    found = match_hardware(device, memory)
    assert found == replace(HARDWARE[name], memory_bytes=memory)


@pytest.mark.parametrize("device", ["NVIDIA RTX A1000", "NVIDIA A10", "NVIDIA L40S"])
def test_a_gpu_of_another_name_says_that_its_rates_are_assumed(device) -> None:
    found = match_hardware(device, 24e9)
    assert found.memory_bytes == 24e9
    assert found.source == f"{device}: not in the table, so the rates of an RTX 4090 are assumed"


def test_this_machine_has_its_own_memory_and_ranks_share_it() -> None:
    memory = hardware(torch.device("cpu"))["memory_bytes"]
    assert this_hardware("cpu").memory_bytes == memory
    assert this_hardware("cpu", ranks=4).memory_bytes == memory / 4
    assert find_hardware("here") == this_hardware()


@pytest.mark.gpu
def test_this_gpu_has_its_own_memory() -> None:
    memory = torch.cuda.get_device_properties(0).total_memory
    assert this_hardware("cuda").memory_bytes == memory
    assert this_hardware("cuda", 2 * torch.cuda.device_count()).memory_bytes == memory / 2


@settings(max_examples=15, deadline=None)
@given(job=jobs, hardware=machines)
def test_the_choice_fits_and_nothing_is_much_faster(job, hardware) -> None:
    cluster = Cluster(hardware=hardware, num_gpus=2)
    found = search(job, cluster)
    if not found or not found[0].fits:
        with pytest.raises(ConfigError, match="no layout that these settings allow fits on 2 x"):
            choose(job, cluster)
        return
    best, _ = choose(job, cluster)
    assert best.fits
    assert best.time.total <= 1.02 * found[0].time.total


def test_the_reason_says_what_a_plainer_layout_would_take() -> None:
    h200 = HARDWARE["h200"]
    roomy, reason = choose(JOB, Cluster(hardware=h200))
    assert roomy.layout == Layout(micro_batch=4)
    assert reason.startswith("resident, exact: ")
    assert reason.endswith("layouts that fit")
    tight, reason = choose(JOB, Cluster(hardware=replace(h200, memory_bytes=10e9)))
    assert tight.layout.checkpointing
    assert "; resident, exact takes " in reason
    assert reason.endswith("GB, too much")
    _, reason = choose(JOB, Cluster(hardware=h200, num_gpus=4), [Layout(pipe=2, data=2)])
    assert "2 x 2 (stages x replicas), resident, exact, micro-batches of 1: " in reason


def test_only_the_given_layouts_are_chosen_from() -> None:
    cluster = Cluster(hardware=HARDWARE["h200"])
    lean = (one for one in layouts(JOB, cluster) if one.state == "lean" and one.checkpointing)
    found = choose(JOB, cluster, lean)[0].layout
    assert (found.state, found.checkpointing) == ("lean", True)
    with pytest.raises(ConfigError, match="the smallest takes nothing of"):
        choose(JOB, cluster, [])


def test_a_frozen_embedding_has_neither_gradient_nor_state() -> None:
    frozen = replace(JOB, network=JOB.network.with_frozen(ENDS))
    numel = sum(m.numel for i in (0, -1) for m in JOB.network.layers[i].matrices)
    for state, trained in (("exact", 4 + 2 + 8 + 2), ("lean", 7 + 8 / 256)):
        layout = Layout(state=state, micro_batch=4, checkpointing=True)  # type: ignore[arg-type]
        before, after = peak(JOB, layout), peak(frozen, layout)
        saved = before.state_bytes - after.state_bytes
        assert saved == pytest.approx((trained - 2) * numel, rel=1e-6)
        assert after.peak_bytes < before.peak_bytes
        times = [
            step_time(job, layout, Cluster(hardware=HARDWARE["h200"])) for job in (JOB, frozen)
        ]
        assert times[1].compute < times[0].compute
        assert times[1].optimizer < times[0].optimizer


def test_a_budget_for_all_weights_is_as_fast_as_resident_ones() -> None:
    cluster = Cluster(hardware=HARDWARE["h200"])
    for network in (JOB.network, JOB.network.with_frozen(ENDS)):
        resident, budget = (
            step_time(replace(JOB, network=network), Layout(weights=weights), cluster)
            for weights in ("resident", 10**11)  # type: ignore[arg-type]
        )
        assert budget.expand_compress == resident.expand_compress


def test_frozen_state_is_what_the_ledger_says() -> None:
    model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
    for name in ("embed", "position", "head"):
        getattr(model, name).requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    opt = samo.AdamW(samo.param_groups(model, lr=1e-3))
    model(*[torch.randint(256, (1, 64))] * 2).backward()
    opt.step()
    job = samo.plan(model, gpu="h200", batch=1, context=64, freeze_embeddings=True).job
    predicted = peak(job, Layout()).state_bytes
    assert predicted == pytest.approx(samo.ledger(model, opt).measured_bytes, rel=0.01)


def test_what_is_pruned_cannot_be_frozen() -> None:
    with pytest.raises(ConfigError, match="head cannot be frozen and pruned"):
        samo.plan("tiny", rules={"head": 0.5}, freeze_embeddings=True)
