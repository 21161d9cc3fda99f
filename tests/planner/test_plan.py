"""`samo.plan` and `samo plan`: answers, errors, exit codes, and commands that exist."""

import copy
import dataclasses
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import samo
from samo.bench import machine
from samo.cli.commands import Finetune, Train
from samo.cli.main import main, parse
from samo.errors import ConfigError
from samo.models.gpt import GPT, GPTConfig
from samo.planner.answer import Plan
from samo.planner.command import command
from samo.planner.hardware import HARDWARE, Hardware, find_hardware, write_hardware
from samo.planner.local import this_hardware
from samo.planner.public import PUBLIC
from samo.train.resolve import resolve

LONG = pytest.mark.long


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLIC["llama-2-7b"]))
    return folder


def test_llama_7b_at_80_percent_fits_a_24_gb_card(llama, capsys) -> None:
    assert main(["plan", str(llama), "--sparsity", "0.8", "--gpu", "rtx4090"]) == 0
    shown = capsys.readouterr().out
    assert "6,738,415,616 parameters, pruned: attention 80 %, mlp 80 %;" in shown
    assert "streamed, lean, checkpointed" in shown
    assert "samo 1; SAMO paper 4" in " ".join(shown.split())
    assert f"samo finetune {llama} --data FILE" in shown


@pytest.mark.parametrize("freezes", [False, True])
def test_llama_3_8b_is_known_by_name_and_fits_24_gb(freezes) -> None:
    found = samo.plan(
        "llama-3-8b", sparsity=0.8, gpu="rtx4090", batch=2, context=2048, freeze_embeddings=freezes
    )
    assert found.best is not None
    assert found.best.layout.state == "lean"
    assert found.best.memory.needed_bytes < 24e9
    assert ("--freeze-embeddings" in found.command) == freezes
    assert found.command.startswith("samo finetune MODEL_DIR ")
    assert ("frozen: embedding, head" in str(found)) == freezes


@pytest.mark.parametrize(
    "typed",
    [
        {"target": "tiny", "gpu": "rtx4090"},
        {"target": "gpt3-13b", "gpu": "a100-40", "gpus": 64, "batch": 1024},
        {"target": "llama-3-70b", "gpu": "h200", "batch": 2},
        {"target": "qwen2.5-7b", "gpu": "24GB", "gpus": 4},
        {"target": "gpt3-175b", "gpu": "rtx4090", "gpus": 256, "gpus_per_node": 1},
        {"target": "gpt3-175b", "gpu": "laptop-8gb"},
    ],
    ids=lambda typed: f"{typed['target']}-{typed['gpu']}",
)
def test_tables_and_prose_are_100_columns_wide_at_most(typed: dict[str, Any]) -> None:
    found = samo.plan(**typed)
    commands = {f"  {line}" for line in found.command.splitlines()}
    assert all(len(line) <= 100 for line in str(found).splitlines() if line not in commands)
    tables = [
        part for part in str(found).split("\n\n") if part.startswith(("GB", "MB", "s ", "ms"))
    ]
    assert len(tables) == 2
    assert not [row for table in tables for row in table.splitlines() if row.startswith(" ")]


def test_the_answer_comes_first_and_ten_rows_are_shown() -> None:
    def first(**typed: Any) -> str:
        return str(samo.plan(**typed)).splitlines()[0]

    found = samo.plan("llama-3-8b", gpu="rtx4090")
    best, shown = found.options[0], str(found)
    rate = 8 * 2048 / best.time.total
    assert shown.startswith(
        "Yes: streamed, lean, checkpointed needs 21.2 GB of 24.6 GB, 10.4 s a step "
        f"({rate:,.0f} tokens/s)\n"
    )
    tables = [part.splitlines() for part in shown.split("\n\n")]
    assert [len(table) for table in tables if table[0].startswith(("GB ", "s "))] == [11, 11]
    assert f"{len(found.options) - 6} more layouts are in --json." in shown
    assert "usable: 25.4 GB, which is 23.7 GiB (a GB is 10^9 bytes" in shown
    assert found.to_dict()["options"][0]["tokens_per_s"] == pytest.approx(rate)
    tight = Hardware(name="tight", memory_bytes=19e9, flops=1e14, bandwidth=1e12)
    answer = first(target="llama-3-8b", gpu=tight)
    assert answer.startswith("Barely: streamed, lean, checkpointed needs 17.9 GB of 18.2 GB, ")
    small = {"target": "llama-3-8b", "sparsity": 0.8, "batch": 2, "gpu": "16GB"}
    answer = first(**small)
    assert answer.startswith("No: even streamed, lean, checkpointed needs ")
    assert "; instead 15.0 GB with frozen embeddings: --freeze-embeddings" in " ".join(
        str(samo.plan(**small)).split()
    )
    assert first(**small, freeze_embeddings=True).startswith("Barely: ")


def test_names_have_any_case_and_cards_need_none(tmp_path, monkeypatch) -> None:
    assert samo.plan("Llama-3-8B").to_dict() == samo.plan("llama-3-8b").to_dict()
    assert samo.plan("GPT3-125M").command == samo.plan("gpt3-125m").command
    card = find_hardware("24GB")
    assert card.memory_bytes == pytest.approx(HARDWARE["rtx3090"].memory_bytes, rel=0.002)
    assert card.flops == HARDWARE["rtx3090"].flops
    assert card.source.startswith("any card of 24 GB: the rates of the rtx3090, the nearest known")
    assert find_hardware("80 GiB").flops == HARDWARE["a100-80"].flops
    with pytest.raises(ConfigError, match="unknown GPU '0GB'"):
        find_hardware("0GB")
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
    assert "less 500 MB for the process." in str(here)
    assert ".cuda()" in samo.plan(model, gpu="rtx4090").command
    small = replace(this_hardware("cpu"), memory_bytes=8e9)
    assert not [line for line in samo.plan("gpt3-13b", gpu=small).advice if "--gpus" in line]


def test_units_are_those_of_the_model() -> None:
    def units(found: Plan) -> list[str]:
        tables = [line.split() for line in str(found).splitlines() if " dense " in f"{line} "]
        return [words[0] for words in tables if "needs" in words]

    small, large = samo.plan("tiny", gpu="rtx4090"), samo.plan("gpt3-13b", gpu="h200")
    assert (units(small), units(large)) == (["MB"], ["GB"])
    assert "\nms " in str(small)
    assert "\ns " in str(large)
    best = small.options[0]
    row = next(line for line in str(small).splitlines() if line.startswith("resident exact "))
    needs, peak = (float(word) for word in row.split()[2:4])
    assert needs == pytest.approx(best.memory.needed_bytes / 1e6, abs=0.05)
    assert peak == pytest.approx(best.memory.peak_bytes / 1e6, abs=0.05)


def test_the_command_line_answers_without_torch(llama) -> None:
    code = (
        "import sys; from samo.cli.main import main; "
        f"code = main(['plan', {str(llama)!r}, '--gpu', 'h200', '--json']); "
        "assert not {'torch', 'matplotlib', 'numpy'} & {*sys.modules}; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["fits"] is True
    assert found["options"][0]["step_s"] > 0


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("gpt3-13b --gpus 0", 2, "gpus must be a whole number, 1 or more, got 0"),
        ("gpt3-13b --gpu rtx4900", 2, "unknown GPU 'rtx4900' (did you mean 'rtx4090'?)"),
        ("gpt3-13b --gpu mine.toml", 2, "hardware file 'mine.toml': No such file"),
        ("gpt3-13b --gpus 2048 --batch 4", 2, "a batch of 4 sequences is too small for 2048 GPUs"),
        ("gpt3-14b", 2, "no shape and no folder 'gpt3-14b' (did you mean 'gpt3-1"),
        (
            "meta-llama/Llama-3.1-8B",
            2,
            "reads no hub; download the model and name its folder or config.json, or plan for a "
            "shape (did you mean 'llama-3-8b'?)",
        ),
        (
            "gpt3-13b --sparsity 80",
            2,
            "must be 0 or more and less than 1 (0.9 prunes 90 %), got 80.0",
        ),
        ("gpt3-13b --rules mlps 0.5", 2, "unknown kind of matrix 'mlps'"),
        ("gpt3-13b --context 4096", 2, "context 4096 is longer than that of 'gpt3-13b', 2048"),
        ("gpt3-13b --batch -1", 2, "batch must be a whole number, 1 or more, got -1"),
        ("gpt3-13b --node-gbit 0", 2, "node_gbit must be over 0"),
        (
            "gpt3-13b --freeze-embeddings",
            2,
            "samo train trains the embeddings of 'gpt3-13b'; leave",
        ),
        ("gpt3-13b --gpus-per-node 0", 2, "gpus_per_node must be over 0"),
        ("gpt3-13b --figure a.pdf", 2, "--figure writes .svg or .png"),
        ("", 2, "name a model to plan for"),
        ("--num-layers 0 --width 64", 2, "must be 1 or more"),
    ],
)
def test_nonsense_is_named_in_one_line(typed, code, message, capsys) -> None:
    assert main(["plan", *typed.split()]) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_what_does_not_fit_has_its_own_exit_code_and_advice(capsys) -> None:
    assert main(["plan", "gpt3-13b", "--gpu", "laptop-8gb"]) == 3
    shown = capsys.readouterr().out
    assert shown.startswith("No: even streamed, lean, checkpointed needs 17.7 GB of 7.38 GB; ")
    advice = shown.partition("This would fit:\n")[2].splitlines()
    assert advice[-1] == "  1 x rtx3090: --gpu rtx3090"
    assert len(advice) == 2
    for line in advice:
        flags = line.partition(": ")[2].split()
        assert main(["plan", "gpt3-13b", "--gpu", "laptop-8gb", *flags]) == 0, line


@pytest.mark.parametrize(
    "typed",
    [
        {"target": "gpt3-2.7b", "gpu": "rtx3090"},
        {"target": "gpt3-13b", "gpu": "rtx4090"},
        {"target": "gpt3-13b", "gpu": "a100-40", "gpus": 64, "batch": 1024},
        {"target": "gpt3-175b", "gpu": "h100", "gpus": 8},
        {"target": "gpt3-6.7b", "gpu": "h100", "gpus": 16, "node_gbit": 10.0},
    ],
    ids=lambda typed: f"{typed['target']}-{typed['gpu']}",
)
def test_the_command_has_the_layout_of_the_plan(typed: dict[str, Any]) -> None:
    found = samo.plan(**typed)
    assert found.best is not None
    words = shlex.split(found.command)
    config = parse(["train", "notes.txt", *words[words.index("TEXT") + 1 :]])
    assert isinstance(config, Train)
    own, resolved = found.best.layout, resolve(config)
    assert resolved.mesh.pipe == own.pipe
    assert (resolved.mesh.shard == "weights") == own.shard
    assert resolved.model.checkpointing == own.checkpointing
    assert resolved.optim.state == own.state
    assert str(resolved.run.weights) == str(own.weights)
    assert resolved.run.batch_size * resolved.run.accumulate == found.job.batch
    if words[0] == "torchrun":
        assert int(words[2]) * int(words[4]) == found.cluster.num_gpus


@pytest.mark.parametrize(
    "typed",
    [
        {"gpu": "rtx4090", "sparsity": 0.8, "batch": 2, "freeze_embeddings": True},
        {"gpu": "rtx5090", "sparsity": 0.9, "rules": {"attention": 0.8}},
        {"gpu": "h200"},
        {"gpu": "rtx4090", "gpus": 4, "batch": 16},
        {"gpu": "h100", "gpus": 16},
    ],
    ids=lambda typed: f"{typed.get('gpus', 1)}-{typed['gpu']}",
)
def test_the_command_fine_tunes_with_the_layout_of_the_plan(typed: dict[str, Any]) -> None:
    found = samo.plan("llama-3-8b", context=1024, **typed)
    assert found.best is not None
    own, words = found.best.layout, shlex.split(found.command)
    assert own.pipe == 1
    config = parse(words[words.index("finetune") :])
    assert isinstance(config, Finetune)
    resolved = resolve(config)
    assert (resolved.mesh.shard == "weights") == own.shard
    assert resolved.model.checkpointing == own.checkpointing
    assert resolved.model.freeze_embeddings == bool(found.job.network.frozen)
    assert resolved.model.context == found.job.context
    assert (resolved.optim.state, str(resolved.run.weights)) == (own.state, str(own.weights))
    assert resolved.run.batch_size * resolved.run.accumulate == found.job.batch
    assert resolved.prune.sparsity == typed.get("sparsity", 0.9)
    assert resolved.prune.rules == ({"*att*": 0.8} if "rules" in typed else {})


def test_the_command_prunes_by_rule_and_skips_dense_steps_that_do_not_fit() -> None:
    many = {"gpu": "a100-40", "gpus": 64, "batch": 1024}
    found = samo.plan("gpt3-13b", rules={"attention": 0.8, "head": 0.5}, **many)
    assert found.best is not None
    assert found.best.layout.shard
    assert found.rivals["autocast"].fits  # on another mesh
    words = shlex.split(found.command)
    config = parse(["train", "notes.txt", *words[words.index("TEXT") + 1 :]])
    assert isinstance(config, Train)
    assert config.prune.sparsity == 0.9
    assert config.prune.rules == {"*att*": 0.8, "*head*": 0.5}
    assert config.prune.dense_steps == 0
    assert config.data.vocab_size == found.job.network.vocab_size
    assert "--dense-steps" not in samo.plan("gpt3-125m", gpu="h100").command


def test_about_as_fast_is_exact_and_leaves_room(llama: Path) -> None:
    small = samo.plan("gpt3-125m", gpu="h100").best
    assert small is not None
    assert (small.layout.state, small.layout.weights) == ("exact", "resident")
    tight = samo.plan(llama, sparsity=0.8, gpu="rtx4090").best
    assert tight is not None
    assert tight.memory.needed_bytes < 0.9 * 25.4e9
    assert not samo.plan("gpt3-175b", gpu="rtx4090").command


@pytest.mark.parametrize("gpu", ["rtx4090", "v100-16"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_lines_for_a_module_run(family: str, gpu: str) -> None:
    model: Any = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
    if family == "llama":
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=256, max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
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


def test_hardware_files_are_read_back(tmp_path) -> None:
    path = tmp_path / "mine.json"
    write_hardware(HARDWARE["h200"], path)
    assert find_hardware(path) == HARDWARE["h200"]
    toml = tmp_path / "own.toml"
    toml.write_text(
        "memory_bytes = 1e10\nflops = 1e13\nbandwidth = 1e11\n[inter]\nbandwidth = 1e9\n"
    )
    assert find_hardware(toml).inter.bandwidth == 1e9
    toml.write_text("memory = 1e10\n")
    with pytest.raises(ConfigError, match="unknown key 'memory' \\(did you mean 'memory_bytes'"):
        find_hardware(toml)
    toml.write_text("memory_bytes = 'x'\nflops = 1\nbandwidth = 1\n")
    with pytest.raises(ConfigError, match="memory_bytes must be over 0, got 'x'"):
        find_hardware(toml)
    toml.write_text("memory_bytes = 1\n")
    with pytest.raises(ConfigError, match="missing"):
        find_hardware(toml)


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_the_figure_shows_memory_and_time(name, tmp_path) -> None:
    path = tmp_path / name
    code = main(["plan", "gpt3-175b", "--gpus", "8", "--figure", str(path), "--json"])
    assert code == 0
    written = path.read_bytes()
    assert written[1:4] == b"PNG" if name.endswith("png") else b"seconds of a step" in written


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(machine._ROUNDS, marks=LONG)])
def test_a_measured_machine_can_be_planned_for(rounds, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "_ROUNDS", rounds)
    if rounds == 1:
        monkeypatch.setattr(machine, "_CPU_WIDTHS", (("large", 64), ("small", 32)))
    path = tmp_path / "here.json"
    assert main(["plan", "--measure", str(path)]) == 0
    assert "plan with it" in capsys.readouterr().out
    assert main(["plan", "tiny", "--gpu", str(path)]) == 0
    assert "measured: " in capsys.readouterr().out


def test_sparsity_of_kinds_changes_the_plan() -> None:
    def state(**rules: float) -> float:
        found = samo.plan("gpt3-13b", gpu="h200", rules=rules)
        kinds = ((one.layout.weights, one.layout.state) for one in found.options)
        return found.options[[*kinds].index(("resident", "exact"))].memory.state_bytes

    assert state(attention=0.0) > 1.5 * state()
