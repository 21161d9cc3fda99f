"""GPUs by name, by memory and from files; this machine, and one that was measured."""

from dataclasses import replace

import pytest
import torch

from samo.bench import measure_machine
from samo.cli.main import main
from samo.errors import ConfigError
from samo.planner.hardware import HARDWARE, find_hardware, match_hardware, write_hardware
from samo.planner.this_machine import this_hardware
from samo.utils.environment import hardware


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


def test_a_card_needs_no_name() -> None:
    card = find_hardware("24GB")
    assert card.memory_bytes == pytest.approx(HARDWARE["rtx3090"].memory_bytes, rel=0.002)
    assert card.flops == HARDWARE["rtx3090"].flops
    assert card.source.startswith("any card of 24 GB: the rates of the rtx3090, the nearest known")
    assert find_hardware("80 GiB").flops == HARDWARE["a100-80"].flops
    with pytest.raises(ConfigError, match="unknown GPU '0GB'"):
        find_hardware("0GB")


def test_hardware_files_are_read_back(tmp_path) -> None:
    path = tmp_path / "mine.json"
    write_hardware(HARDWARE["h200"], path)
    assert find_hardware(path) == HARDWARE["h200"]
    toml = tmp_path / "own.toml"
    rates = "memory_bytes = 1e10\nflops = 1e13\nbandwidth = 1e11\n"
    toml.write_text(f"{rates}[inter]\nbandwidth = 1e9\n")
    assert find_hardware(toml).inter.bandwidth == 1e9
    for text, message in {
        "memory = 1e10\n": r"unknown key 'memory' \(did you mean 'memory_bytes'",
        "memory_bytes = 'x'\nflops = 1\nbandwidth = 1\n": "memory_bytes must be over 0, got 'x'",
        "memory_bytes = 1\n": "missing",
        f"source = {'[' * 9999}": "hardware file '.*own.toml'",
        f"{rates}gpus_per_node = 1.5\n": "gpus_per_node must be over 0, got 1.5",
        f"{rates}flops_fraction = 'x'\n": "flops_fraction must be over 0, got 'x'",
        f"{rates}[inter]\nbandwidth = 0\n": "bandwidth must be over 0, got 0",
        f"{rates}dtype = 'int8'\n": "no flops of dtype 'int8' are known",
    }.items():
        toml.write_text(text)
        with pytest.raises(ConfigError, match=message):
            find_hardware(toml)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds", [1, pytest.param(measure_machine._ROUNDS, marks=pytest.mark.long)]
)
def test_a_measured_machine_can_be_planned_for(rounds, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measure_machine, "_ROUNDS", rounds)
    if rounds == 1:
        monkeypatch.setattr(measure_machine, "_CPU_WIDTHS", (("large", 64), ("small", 32)))
    path = tmp_path / "here.json"
    assert main(["plan", "--measure", str(path)]) == 0
    assert "plan with it" in capsys.readouterr().out
    assert main(["plan", "tiny", "--gpu", str(path)]) == 0
    assert "measured: " in capsys.readouterr().out
