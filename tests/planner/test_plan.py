"""`samo.plan` and `samo plan`: answers, errors, exit codes, and commands that exist."""

import copy
import dataclasses
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samo
from samo.cli.commands import Finetune, Train
from samo.cli.main import main, parse
from samo.errors import ConfigError
from samo.models.gpt import GPT, GPTConfig
from samo.planner.hardware import Hardware
from samo.planner.public_models import PUBLIC
from samo.planner.search import dense_phase
from samo.planner.suggested_command import command
from samo.planner.this_machine import this_hardware
from samo.train.resolve import resolve
from tests.integrations.tiny_lms import tiny_lm


@pytest.mark.parametrize(
    ("typed", "units"),
    [
        ({"target": "tiny", "gpu": "rtx4090"}, ["MB", "ms"]),
        ({"target": "gpt3-13b", "gpu": "a100-40", "gpus": 64, "batch": 1024}, ["GB", "s"]),
        ({"target": "llama-3-70b", "gpu": "h200", "batch": 2}, ["GB", "s"]),
        ({"target": "qwen2.5-7b", "gpu": "24GB", "gpus": 4}, ["GB", "s"]),
        (
            {"target": "gpt3-175b", "gpu": "rtx4090", "gpus": 256, "gpus_per_node": 1},
            ["GB", "s"],
        ),
        ({"target": "gpt3-175b", "gpu": "laptop-8gb"}, ["GB", "s"]),
    ],
    ids=str,
)
def test_there_are_two_tables_and_100_columns_at_most(
    typed: dict[str, Any], units: list[str]
) -> None:
    found = samo.plan(**typed)
    commands = {f"  {line}" for line in found.command.splitlines()}
    assert all(len(line) <= 100 for line in str(found).splitlines() if line not in commands)
    tables = [part.splitlines() for part in str(found).split("\n\n")][2:4]
    assert [table[0].split()[0] for table in tables] == units
    rows = min(len(found.options), 6) + len(found.rivals)
    assert [len(table) for table in tables] == [1 + rows] * 2
    place = tables[0][0].index("needs") - 1
    needs, peak = (float(word.replace(",", "")) for word in tables[0][1][place:].split()[:2])
    memory, unit = found.options[0].memory, 1e6 if units[0] == "MB" else 1e9
    assert needs == pytest.approx(memory.needed_bytes / unit, abs=0.05)
    assert peak == pytest.approx(memory.peak_bytes / unit, abs=0.05)


def test_the_answer_comes_first() -> None:
    def first(**typed: Any) -> str:
        return str(samo.plan(**typed)).splitlines()[0]

    found = samo.plan("llama-3-8b", sparsity=0.9, gpu="rtx4090")
    best, shown = found.options[0], str(found)
    rate = 8 * 2048 / best.time.total
    assert " ".join(shown.split()).startswith(
        "Yes, at 90 % sparsity: streamed, lean, checkpointed needs 21.2 GB of 24.6 GB, 10.4 s a "
        f"step ({rate:,.0f} tokens/s) llama-3-8b: "
    )
    assert "8,030,261,248 parameters, pruned: attention 90 %, mlp 90 %; 8" in shown
    assert "power of two: samo 1; SAMO paper 4; dense 8-bit 4; dense mixed 16;" in shown
    assert f"--json has {len(found.options) - 6} more layouts." in shown
    assert "usable: 25.4 GB, which is 23.7 GiB (a GB is 10^9 bytes" in shown
    assert found.to_dict()["options"][0]["tokens_per_s"] == pytest.approx(rate)
    tight = Hardware(name="tight", memory_bytes=19e9, flops=1e14, bandwidth=1e12)
    answer = first(target="llama-3-8b", sparsity=0.9, gpu=tight)
    assert answer.startswith(
        "Barely, at 90 % sparsity: streamed, lean, checkpointed needs 17.9 GB of 18.2 GB, "
    )
    small = {"target": "llama-3-8b", "sparsity": 0.8, "batch": 2, "gpu": "16GB"}
    answer = first(**small)
    assert answer.startswith("No, at 80 % sparsity: even streamed, lean, checkpointed needs ")
    assert " and 15.7 GB are usable; try --freeze-embeddings" in " ".join(
        str(samo.plan(**small)).split()
    )
    answer = first(target="llama-3-8b", sparsity=0.6, rules={"mlp": 0.8}, gpu="h100")
    assert answer.startswith("Barely, at 60 to 80 % sparsity: ")
    frozen = str(samo.plan(**small, freeze_embeddings=True))
    assert frozen.startswith("Barely, ")
    assert "frozen: embedding, head" in frozen
    assert first(target="llama-3-8b").startswith("Yes, at 70 % sparsity (assumed): ")


def test_names_have_any_case_and_a_folder_comes_first(tmp_path, monkeypatch) -> None:
    assert samo.plan("Llama-3-8B").to_dict() == samo.plan("llama-3-8b").to_dict()
    assert samo.plan("GPT3-125M").command == samo.plan("gpt3-125m").command
    # A folder with the name of a public model is that folder.
    monkeypatch.chdir(tmp_path)
    Path("llama-3-8b").mkdir()
    Path("llama-3-8b/config.json").write_text(json.dumps(PUBLIC["qwen3-0.6b"]))
    assert samo.plan("llama-3-8b").command.startswith("samo finetune llama-3-8b ")


def test_a_cpu_gets_no_lines_for_cuda() -> None:
    model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
    here = samo.plan(model, gpu=this_hardware("cpu"))
    assert "cuda" not in here.command
    assert "bfloat16" not in here.command
    assert "less 1.00 GB for the process." in str(here)
    assert ".cuda()" in samo.plan(model, gpu="rtx4090").command
    small = replace(this_hardware("cpu"), memory_bytes=8e9)
    assert not [line for line in samo.plan("gpt3-13b", gpu=small).advice if "--gpus" in line]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("gpt3-13b --gpus 0", "gpus must be a whole number, 1 or more, got 0"),
        ("gpt3-13b --gpu rtx4900", "unknown GPU 'rtx4900' (did you mean 'rtx4090'?)"),
        ("gpt3-13b --gpu mine.toml", "hardware file 'mine.toml': No such file"),
        ("gpt3-13b --gpus 2048 --batch 4", "a batch of 4 sequences is too small for 2048 GPUs"),
        ("gpt3-14b", "'gpt3-14b' is neither a known shape nor a folder (did you mean 'gpt3-1"),
        (
            "meta-llama/Llama-3.1-8B",
            "reads no hub; download the model and name its folder or config.json, or plan for a "
            "shape (did you mean 'llama-3.1-8b'?)",
        ),
        (
            "gpt3-13b --sparsity 80",
            "must be 0 or more and less than 1 (0.9 prunes 90 %), got 80.0",
        ),
        ("gpt3-13b --rules mlps 0.5", "unknown kind of matrix 'mlps'"),
        ("gpt3-13b --context 4096", "context 4096 is longer than that of 'gpt3-13b', 2048"),
        ("llama-3-8b --context 9999", "context 9999 is longer than that of 'llama-3-8b', 8192"),
        ("gpt3-13b --batch -1", "batch must be a whole number, 1 or more, got -1"),
        ("gpt3-13b --node-gbit 0", "node_gbit must be over 0"),
        (
            "gpt3-13b --freeze-embeddings",
            "samo train trains the embeddings of 'gpt3-13b'; leave",
        ),
        ("gpt3-13b --gpus-per-node 0", "gpus_per_node must be over 0"),
        ("gpt3-13b --figure a.pdf", "--figure writes .svg or .png"),
        ("", "name a model to plan for"),
        ("--num-layers 0 --width 64", "must be 1 or more"),
    ],
)
def test_nonsense_is_named_in_one_line(typed, message, capsys) -> None:
    assert main(["plan", *typed.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_what_does_not_fit_has_its_own_exit_code_and_advice(capsys) -> None:
    assert main(["plan", "gpt3-13b", "--gpu", "laptop-8gb"]) == 3
    shown = capsys.readouterr().out
    assert shown.startswith(
        "No, at 90 % sparsity (assumed): even streamed, lean, checkpointed needs"
    )
    advice = shown.partition("This would fit:\n")[2].splitlines()
    assert advice[-1] == "  1 x rtx3090: --gpu rtx3090"
    assert len(advice) == 2
    for line in advice:
        flags = line.partition(": ")[2].split()
        assert main(["plan", "gpt3-13b", "--gpu", "laptop-8gb", *flags]) == 0, line


def test_advice_starts_with_the_card_at_hand_and_changes_little() -> None:
    wish: dict[str, Any] = {"sparsity": 0.6, "gpu": "rtx4090"}
    found = samo.plan("llama-3-8b", **wish)
    assert found.advice == [
        "fewer tokens at a time: --batch 1 --context 1024 --freeze-embeddings",
        "pruning more: --sparsity 0.76",
        "pruning more: --sparsity 0.63 --freeze-embeddings",
        "2 x rtx4090: --gpus 2",
        "1 x rtx5090: --gpu rtx5090",
    ]
    small = {"batch": 1, "context": 1024, "freeze_embeddings": True}
    assert samo.plan("llama-3-8b", **wish, **small).best is not None
    for value, fits in ((0.76, True), (0.75, False)):
        other = samo.plan("llama-3-8b", **{**wish, "sparsity": value})
        assert (other.best is not None) == fits


def test_advice_counts_memory_in_the_type_of_the_other_card() -> None:
    # A V100 has no bfloat16, and so larger values.
    wish: dict[str, Any] = {"sparsity": 0.3, "gpus": 3}
    advice = samo.plan("llama-2-7b", gpu="laptop-8gb", **wish).advice
    (other,) = [line.rpartition(" ")[2] for line in advice if "--gpu " in line]
    assert samo.plan("llama-2-7b", gpu=other, **wish).best is not None


def test_advice_names_the_batch_if_that_of_more_gpus_would_not_fit() -> None:
    # One sequence on each GPU needs no memory in which passes are added up.
    wish: dict[str, Any] = {"sparsity": 0.0, "rules": {"mlp": 0.9}, "gpu": "v100-16", "gpus": 4}
    assert "32 x v100-16: --gpus 32 --batch 32" in samo.plan("qwen2.5-32b", **wish).advice
    for batch, fits in ((None, False), (32, True)):
        other = samo.plan("qwen2.5-32b", **{**wish, "gpus": 32, "batch": batch})
        assert (other.best is not None) == fits


@pytest.mark.parametrize(
    ("gpu", "rules", "line"),
    [
        ("8GB", {"embedding": 0.5}, "pruning more: --sparsity 0.92"),
        ("8GB", {"mlp": 0.9}, "pruning more: --sparsity 0.97"),
        ("8GB", {"attention": 0.5}, None),  # too much is left at any sparsity of the others
    ],
)
def test_advice_to_prune_more_leaves_rules_as_they_are(
    gpu: str, rules: dict[str, float], line: str | None
) -> None:
    wish: dict[str, Any] = {"rules": rules, "gpu": gpu, "context": 512}
    advice = samo.plan("llama-2-7b", sparsity=0.6, **wish).advice
    assert next((each for each in advice if "--sparsity" in each), None) == line
    highest = float(line.split()[-1]) if line else 0.98
    assert (samo.plan("llama-2-7b", sparsity=highest, **wish).best is None) == (line is None)


def test_a_teacher_takes_memory_of_every_gpu_and_is_part_of_the_command() -> None:
    alone = samo.plan("llama-3-8b", gpu="h100")
    found = samo.plan("llama-3-8b", gpu="h100", teacher="llama-3.1-8b")
    taken = 2 * 8030261248
    assert found.teacher_bytes == taken
    assert found.options[0].usable_bytes == alone.options[0].usable_bytes - taken
    assert "--teacher MODEL_DIR" in found.command
    assert "less 800 MB for CUDA and 16.1 GB for the teacher." in " ".join(str(found).split())
    small = {"gpu": "rtx4090", "teacher": "llama-3-8b", "freeze_embeddings": True}
    shown = " ".join(str(samo.plan("llama-3-8b", **small)).split())
    assert "and 8.54 GB are usable beside the teacher's 16.1 GB; try without --teacher" in shown
    assert "8.54 GB usable beside the teacher's 16.1 GB of 25.4 GB each" in shown
    small |= {"freeze_embeddings": False}
    assert (
        "no teacher: --freeze-embeddings without --teacher"
        in samo.plan("llama-3-8b", **small).advice
    )
    with pytest.raises(ConfigError, match="samo train has no teacher"):
        samo.plan("gpt3-125m", teacher="gpt3-125m")


def test_the_host_needs_room_for_a_dense_model_or_a_compressed_one() -> None:
    found = samo.plan("llama-3-8b", sparsity=0.8, gpu="h200")
    assert found.host_bytes is not None
    dense, small = found.host_bytes
    assert dense - small == 2 * 8030261248
    assert small == found.options[0].memory.state["values"] + 6979321856 / 8 * 33 / 32
    assert "on the host, for each rank: " in str(found)
    assert samo.plan("gpt3-125m").host_bytes is None


RULES = {"attention": 0.8, "head": 0.5}


@pytest.mark.parametrize(
    ("target", "typed"),
    [
        ("gpt3-2.7b", {"gpu": "rtx3090"}),
        ("gpt3-13b", {"gpu": "rtx4090"}),
        ("gpt3-13b", {"gpu": "a100-40", "gpus": 64, "batch": 1024, "rules": RULES}),
        ("gpt3-175b", {"gpu": "h100", "gpus": 8}),
        ("gpt3-6.7b", {"gpu": "h100", "gpus": 16, "node_gbit": 10.0}),
        ("llama-3-8b", {"gpu": "rtx4090", "sparsity": 0.8, "batch": 2, "freeze_embeddings": True}),
        ("llama-3-8b", {"gpu": "rtx5090", "sparsity": 0.9, "rules": RULES}),
        ("llama-3-8b", {"gpu": "h200"}),
        ("llama-3-8b", {"gpu": "rtx4090", "gpus": 4, "batch": 16}),
        ("llama-3-8b", {"gpu": "h100", "gpus": 16}),
    ],
    ids=str,
)
def test_the_command_has_the_layout_of_the_plan(target: str, typed: dict[str, Any]) -> None:
    found = samo.plan(target, context=1024, **typed)
    assert found.best is not None
    own, words = found.best.layout, shlex.split(found.command)
    if words[0] == "torchrun":
        assert int(words[2]) * int(words[4]) == found.cluster.num_gpus
    config = parse(words[words.index("train" if "train" in words else "finetune") :])
    assert isinstance(config, Train | Finetune)
    resolved = resolve(config)
    assert (resolved.mesh.shard == "weights") == own.shard
    assert resolved.model.checkpointing == own.checkpointing
    assert resolved.model.context == found.job.context
    assert (resolved.optim.state, str(resolved.run.weights)) == (own.state, str(own.weights))
    assert resolved.run.batch_size * resolved.run.accumulate == found.job.batch
    assert resolved.prune.sparsity == typed.get("sparsity", 0.7 if target == "llama-3-8b" else 0.9)
    assert resolved.prune.rules == ({"*att*": 0.8, "*head*": 0.5} if "rules" in typed else {})
    if isinstance(config, Train):
        assert resolved.mesh.pipe == own.pipe
        assert config.data.vocab_size == found.job.network.vocab_size
        fits = dense_phase(found.job, own, found.cluster).fits
        assert config.prune.dense_steps == ("auto" if fits else 0)
    else:
        assert own.pipe == 1
        assert resolved.model.freeze_embeddings == bool(found.job.network.frozen)


def test_about_as_fast_is_exact_and_leaves_room() -> None:
    small = samo.plan("gpt3-125m", gpu="h100").best
    assert small is not None
    assert (small.layout.state, small.layout.weights) == ("exact", "resident")
    tight = samo.plan("llama-2-7b", sparsity=0.8, gpu="rtx4090").best
    assert tight is not None
    assert tight.memory.needed_bytes < 0.9 * 25.4e9
    assert not samo.plan("gpt3-175b", gpu="rtx4090").command


# The name that every version up to 5 has.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("gpu", ["rtx4090", "v100-16"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_lines_for_a_module_run(family: str, gpu: str) -> None:
    model: Any = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
    if family == "llama":
        model = tiny_lm(vocab_size=256)
    found = samo.plan(model, sparsity=0.5, gpu=gpu, freeze_embeddings=True)
    for option in found.options:  # such as checkpointed ones
        lines = command(found, option.layout).replace(".cuda()", "")
        names: dict[str, Any] = {"samo": samo, "torch": torch, "dataclasses": dataclasses}
        exec(lines, names | {"model": copy.deepcopy(model)})
    names["model"] = model
    exec(found.command.replace(".cuda()", ""), names)
    tokens = torch.randint(256, (2, 32))
    outputs = model(tokens, tokens) if family == "gpt" else model(tokens, labels=tokens).loss
    outputs.backward()
    names["opt"].step()
    assert found.best is not None
    held = samo.ledger(model, names["opt"]).measured_bytes
    assert held == pytest.approx(found.best.memory.state_bytes, rel=0.01)


def test_a_module_in_hand_and_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=24, width=2048, num_heads=16, context=2048))
    planned = samo.plan(model, sparsity=0.5, gpu="h200")
    assert planned.job.network.num_params == sum(param.numel() for param in model.parameters())
    small = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
    masks = samo.prune(small, 0.75)
    found = samo.plan(small, masks, gpu="h200").job.network.sparsity
    assert found["mlp"] == pytest.approx(0.75, abs=1e-3)
    assert found["head"] == 0
    with pytest.raises(ConfigError, match="got Linear"):
        samo.plan(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_the_figure_shows_memory_and_time(name, tmp_path) -> None:
    path = tmp_path / name
    code = main(["plan", "gpt3-175b", "--gpus", "8", "--figure", str(path), "--json"])
    assert code == 0
    written = path.read_bytes()
    assert written[1:4] == b"PNG" if name.endswith("png") else b"seconds of a step" in written
