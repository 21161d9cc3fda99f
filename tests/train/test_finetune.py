"""`samo finetune`: a pruned model of Hugging Face, trained by the loop of `samo train`."""

import itertools
import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import samo
from samo.data.batches import Batches, validation_batches
from samo.errors import CheckpointError, ConfigError, RunError
from samo.integrations.export import export
from samo.integrations.model_folders import open_compressed
from samo.planner import this_machine
from samo.planner.this_machine import this_hardware
from samo.train import causal_lm_subject
from samo.train.causal_lm_subject import CausalLMSubject
from samo.train.config import with_values
from samo.train.finetune_config import FinetuneConfig
from samo.train.planning import choose_layout
from samo.train.resolve import resolve
from samo.train.run_dir import RunDir
from samo.train.trainer import resume, train
from tests.core.twins import mask_
from tests.data.model_tokenizer import VOCAB_SIZE, save_model_tokenizer
from tests.integrations.tiny_lms import tiny_lm
from tests.train.helpers import (
    WORDS,
    assert_same_run,
    clipped_step,
    interrupt_at,
    last_masks,
    lines,
    tensors,
)

transformers = pytest.importorskip("transformers")
opened = transformers.AutoModelForCausalLM.from_pretrained

STEPS: Final = 4


def save_lm(folder: Path, family: str = "llama", *, sparsity: float = 0.6, seed: int = 0) -> Any:
    """Write a folder as a user has it: a pruned model, and its tokenizer."""
    model = tiny_lm(family, vocab_size=VOCAB_SIZE, seed=seed)
    masks = samo.prune(model, sparsity) if sparsity else None
    if masks is not None:
        masks.apply_(model)
    folder.mkdir()
    save_model_tokenizer(folder)
    model.save_pretrained(folder)
    return masks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pruned model, its dense parent, and data."""
    folder = tmp_path_factory.mktemp("finetune")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(3, 9))) for _ in range(60)]
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    save_lm(folder / "pruned")
    save_lm(folder / "dense", sparsity=0.0, seed=0)
    return folder


def settings(place: Path, model: str | None = "pruned", **changes: Any) -> FinetuneConfig:
    """Return settings of a short run; ``changes`` are those of any section."""
    usual: dict[str, Any] = {
        **{"model": model and place / model, "data": (place / "notes.jsonl",)},
        **{"valid_fraction": 0.1, "context": 32, "batch_size": 2, "lr": 1e-3, "eps": 1e-5},
        **{"steps": STEPS, "eval_every": 2, "log_every": 1, "save_every": 2, "sample_tokens": 3},
    }
    return with_values(FinetuneConfig(), **{**usual, **changes})


def resolved(place: Path, model: str = "pruned", **changes: Any) -> Any:
    return resolve(settings(place, model, **changes))


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    run = place / "finished"
    train(settings(place), run)
    return run


def with_generation_config(place: Path, folder: Path, text: str) -> Path:
    shutil.copytree(place / "pruned", folder)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_examples_that_end_with_another_token_than_the_model_are_named(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = f'{{"eos_token_id": [1, 2, -1, {2**70}]}}'
    folder = with_generation_config(place, tmp_path / "model", ends)
    config = settings(place, model=str(folder))
    CausalLMSubject(resolve(config)).open_text(tmp_path)
    assert "examples end with token 302 ('<|im_end|>'), but the model stops" in caplog.text
    assert "Add 302 to eos_token_id in" in caplog.text
    caplog.clear()
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 302]}')
    CausalLMSubject(resolve(config)).open_text(tmp_path)
    assert "eos_token_id" not in caplog.text


def test_settings_that_cannot_generate_text_leave_out_the_sample_and_write_the_model(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_generation_config(place, tmp_path / "model", '{"stop_strings": ["x"]}')
    train(settings(place, model=str(folder), steps=1), tmp_path / "run")
    assert "no sample: the model cannot generate text: " in caplog.text
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


# What a run computes


@pytest.mark.parametrize("teacher", [False, True])
def test_a_run_is_dense_training_with_masks(place: Path, tmp_path: Path, teacher: bool) -> None:
    """A twin on dense state: torch's AdamW on masked weights, all logits at once, one by one."""
    run = tmp_path / "run"
    extra: dict[str, Any] = {"teacher": place / "dense", "distill": 0.3} if teacher else {}
    config = settings(place, accumulate=2, **extra)
    train(config, run)
    masks = last_masks(run)
    twin = opened(place / "pruned").train()
    parent = opened(place / "dense").eval()
    mask_(twin, masks)
    decay = [p for p in twin.parameters() if p.dim() > 1]
    others = [p for p in twin.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], eps=1e-5
    )
    subject = CausalLMSubject(resolve(config))
    text = subject.open_text(tmp_path / "twin")
    batches = Batches(text.train, context=32, batch_size=2, seed=0)
    for line in lines(run, "step"):
        parts = [next(batches) for _ in range(2)]
        total = torch.zeros(())
        for batch in parts:
            assert batch.positions_BT is not None
            for row, targets, places in zip(batch.inputs_BT, batch.targets_BT, batch.positions_BT):
                total = total + sum_of_losses(
                    twin, parent if teacher else None, row, targets, places
                )
        loss = total / sum(batch.num_tokens for batch in parts)
        for group in opt.param_groups:
            group["lr"] = line["lr"]
        norm = clipped_step(twin, opt, loss)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    trained = samo.load_masks(run / "checkpoints" / "last")
    assert trained == masks
    model = opened(run / "model")
    state = samo.dense_state_dict(model)
    for name, param in twin.named_parameters():
        # fp32, sums in another order; a step moves a weight by up to lr = 1e-3.
        torch.testing.assert_close(state[name], param.detach(), rtol=1e-4, atol=2e-5)


def sum_of_losses(model: Any, teacher: Any, row: Tensor, targets: Tensor, places: Tensor) -> Tensor:
    """Return the losses of the examples in a packed row, each of which is read by itself."""
    total = torch.zeros(())
    starts = [*(places == 0).nonzero().flatten().tolist(), len(row)]
    for start, stop in itertools.pairwise(starts):
        goal = targets[start:stop]
        if bool((goal == -100).all()):
            continue
        logits = model(input_ids=row[None, start:stop]).logits[0]
        hard = F.cross_entropy(logits, goal, reduction="sum")
        if teacher is None:
            total = total + hard
            continue
        with torch.no_grad():
            wanted = teacher(input_ids=row[None, start:stop]).logits[0]
        gap = F.kl_div(
            F.log_softmax(logits / 2, -1), F.softmax(wanted / 2, -1), reduction="none"
        ).sum(-1)
        total = total + 0.7 * hard + 0.3 * 4 * gap[goal != -100].sum()
    return total


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mistral", "gemma2", "mixtral"])
def test_families_keep_their_masks_and_are_handed_on(
    place: Path, tmp_path: Path, family: str
) -> None:
    masks = save_lm(tmp_path / "model", family)
    config = settings(place, model=str(tmp_path / "model"), steps=2, sample_tokens=0)
    result = train(config, tmp_path / "run")
    assert last_masks(tmp_path / "run") == masks
    model = opened(tmp_path / "run" / "model")
    assert samo.masks(model) == masks
    text = CausalLMSubject(resolve(config)).open_text(tmp_path / "data")
    batches = validation_batches(text.valid, context=32, batch_size=2, max_batches=20)
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = model(
                input_ids=batch.inputs_BT, position_ids=batch.positions_BT, use_cache=False
            ).logits
            total += float(
                F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum")
            )
            count += batch.num_tokens
    assert result.valid_loss == pytest.approx(total / count, rel=1e-5)


def test_the_model_of_a_run_has_the_logits_of_the_one_in_memory(
    place: Path, tmp_path: Path
) -> None:
    finish = CausalLMSubject.finish
    with mock.patch.object(CausalLMSubject, "finish", autospec=True, side_effect=finish) as called:
        train(settings(place, dtype="bfloat16"), tmp_path / "run")
    learner, ids = called.call_args.args[2], torch.arange(20).view(2, 10)
    model = opened(tmp_path / "run" / "model").eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, learner.model.eval()(ids).logits)


def test_frozen_embeddings_do_not_move(place: Path, tmp_path: Path) -> None:
    for family, ends in (
        ("llama", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}),
    ):
        folder, run = tmp_path / family, tmp_path / f"run-{family}"
        save_lm(folder, family)
        config = settings(place, model=str(folder), freeze_embeddings=True, steps=2)
        result = train(config, run)
        before = opened(folder)
        after = opened(run / "model")
        moved = {
            name
            for name, param in before.named_parameters()
            if not torch.equal(param, samo.dense_state_dict(after)[name])
        }
        assert moved == {name for name, _ in before.named_parameters()} - ends
        held = [name for name in tensors(run) if name.startswith("optimizer:")]
        assert not [name for name in held if any(end in name for end in ends)]
        assert result.ledger is not None
        assert result.ledger.measured_bytes == result.ledger.predicted_bytes


@pytest.mark.parametrize(
    ("weights", "is_frozen"), [("resident", False), ("streamed", False), ("resident", True)]
)
def test_checkpointing_and_streaming_change_no_bit(
    place: Path, tmp_path: Path, weights: str, is_frozen: bool
) -> None:
    config = settings(place, freeze_embeddings=is_frozen, steps=2)
    train(config, tmp_path / "plain")
    train(with_values(config, checkpointing=True, weights=weights), tmp_path / "saving")
    plain, saved = (lines(tmp_path / name, "step") for name in ("plain", "saving"))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in plain] == [line[name] for line in saved]
    wanted = tensors(tmp_path / "plain")
    assert all(torch.equal(wanted[name], own) for name, own in tensors(tmp_path / "saving").items())


# Where masks come from


def test_masks_come_from_the_folder_from_a_file_or_from_pruning(
    place: Path, tmp_path: Path
) -> None:
    dense = opened(place / "dense")
    masks = samo.prune(dense, 0.5, method="random", seed=3)
    masks.save(tmp_path / "masks.safetensors")
    model = opened(place / "dense")
    name = next(iter(masks))
    with torch.no_grad():  # a kept weight that is exactly 0
        model.get_parameter(name).view(-1)[masks[name].to_bool().view(-1).nonzero()[0]] = 0.0
    exact = export(model, tmp_path / "exact", masks=masks, source=place / "dense")
    samo.compress_(model, masks)
    export(model, tmp_path / "small", format="compressed", source=place / "dense")
    found = {}
    for number, (model_dir, changes) in enumerate(
        {
            str(exact): {},
            str(tmp_path / "small"): {},
            str(place / "dense"): {"masks": tmp_path / "masks.safetensors"},
        }.items()
    ):
        run = tmp_path / f"run-{number}"
        train(settings(place, model=model_dir, steps=1, sample_tokens=0, **changes), run)
        found[number] = last_masks(run)
    assert found == {0: masks, 1: masks, 2: masks}


@pytest.mark.parametrize("how", [{"method": "magnitude"}, {}, {"method": "sparsegpt"}])
def test_a_dense_model_is_pruned_on_the_way(
    place: Path, tmp_path: Path, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    train(settings(place, "dense", sparsity=0.5, steps=1, sample_tokens=0, **how), run)
    (pruned,) = lines(run, "prune")
    assert (pruned["step"], pruned["sparsity"]) == (0, 0.5)
    assert last_masks(run).sparsity == 0.5
    method = how.get("method", "wanda")
    assert RunDir.find(run).config().prune.method == method
    assert (f"{method} looks at " in caplog.text) == (method != "magnitude")
    assert [line["step"] for line in lines(run, "eval")] == [0, 1]


# A run and its folder


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_compressed_model_is_trained_and_resumed_without_a_dense_one(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    changes: dict[str, Any] = {"freeze_embeddings": is_frozen, "dtype": "bfloat16"}
    train(settings(place, **changes), tmp_path / "from dense")
    source, small, run = place / "pruned", tmp_path / "small", tmp_path / "run"
    export(open_compressed(source), small, format="compressed", source=source)
    monkeypatch.delattr(causal_lm_subject, "open_model")
    config = settings(place, model=str(small), **changes)
    assert train(config, run, listeners=[interrupt_at(3)]).signal is not None
    assert resume(run).step == STEPS
    assert_same_run(tmp_path / "from dense", run)


def test_a_step_larger_than_the_data_is_told(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(settings(place, steps=1, batch_size=10, accumulate=20), tmp_path / "run")
    rows = lines(tmp_path / "run", "data")[0]["sequences"]
    assert 10 < rows < 200
    assert f"the data fills {rows} sequences, and a step takes 200: it reads" in caplog.text


def test_a_run_stands_for_itself(place: Path, finished: Path) -> None:
    about = json.loads((finished / "run.json").read_text())
    assert about["kind"] == "finetune"
    assert about["config"]["run"]["weights"] == "resident"
    assert about["config"]["optim"]["state"] == "exact"
    assert {"config.json", "tokenizer.json"} <= {
        file.name for file in (finished / "hugging-face").iterdir()
    }
    assert lines(finished, "layout")[0]["reason"].startswith("resident, exact: ")
    data = lines(finished, "data")[0]
    assert data["tokens"] > 32 * (data["sequences"] - 1) > 0
    assert 0 < data["valid_tokens"] < data["tokens"]
    evals = lines(finished, "eval")
    assert [line["step"] for line in evals] == [0, 2, 4]
    assert evals[-1]["valid_loss"] < evals[0]["valid_loss"]
    from samo.report.page import write_report

    page = write_report([finished], finished / "report.html").read_text()
    assert "before training" in page


def test_a_resumed_run_is_the_undisturbed_one(place: Path, tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "pruned", tmp_path / "pruned")
    config = settings(place, model=str(tmp_path / "pruned"))
    assert train(config, run, listeners=[interrupt_at(3)]).signal is not None
    shutil.rmtree(tmp_path / "pruned")  # the run needs it no more
    assert not (run / "model").exists()
    assert resume(run).step == STEPS
    assert_same_run(finished, run)
    ours, theirs = ((r / "model" / "model.safetensors").read_bytes() for r in (finished, run))
    assert ours == theirs


def test_a_longer_run_replaces_its_model(tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / ".draft").mkdir()  # as a kill leaves it
    (run / ".draft" / "old").mkdir()
    (run / "model" / "note").touch()
    config = RunDir.find(run).config()
    assert isinstance(config, FinetuneConfig)
    resume(run, config=with_values(config, steps=STEPS + 2))
    assert not (run / "model" / "note").exists()
    assert not (run / ".draft").exists()
    before, after = (load_file(each / "model" / "model.safetensors") for each in (finished, run))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])


def test_a_run_without_its_description_or_with_a_link_in_it_is_refused(
    tmp_path: Path, finished: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = run / "hugging-face" / "config.json"
    config.rename(run / "hugging-face" / "other.json")
    with pytest.raises(RunError, match=r"it has no hugging-face/config.json; take another copy"):
        resume(run)
    config.symlink_to(run / "hugging-face" / "other.json")
    with pytest.raises(CheckpointError, match=r"config.json. is a link"):
        resume(run)


def test_steps_follow_from_epochs(place: Path, tmp_path: Path) -> None:
    subject = CausalLMSubject(resolved(place, steps="auto", epochs=1.5))
    text = subject.open_text(tmp_path)
    rows = Batches(text.train, context=32, batch_size=2, seed=0).num_windows
    assert subject.config.run.steps == -(-3 * rows // 4)
    assert subject.config.optim.warmup_steps == -(-3 * subject.config.run.steps // 100)


def test_context_is_that_of_the_model_at_most(place: Path, tmp_path: Path) -> None:
    subject = CausalLMSubject(resolved(place, context="auto"))
    subject.open_text(tmp_path)
    assert subject.config.model.context == 64
    with pytest.raises(ConfigError, match=r"--context 65 is longer than the 64 tokens"):
        CausalLMSubject(resolved(place, context=65)).open_text(tmp_path)


def test_metrics_go_to_wandb_if_asked(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(place, steps=2, sample_tokens=0, wandb="project")
    monkeypatch.setattr("samo.train.resolve.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match="--wandb needs a package that is missing"):
        train(config, tmp_path / "without")
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("samo.train.resolve.is_installed", lambda name: True)
    train(config, tmp_path / "run")
    given, sent = wandb.init.call_args.kwargs, wandb.init.return_value.log.call_args_list
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    assert (given["project"], given["id"]) == ("project", f"run-{run_id}")
    wandb.init.return_value.finish.assert_called_once_with()
    found = [
        (call.kwargs["step"], call.args[0]["valid/loss"])
        for call in sent
        if "valid/loss" in call.args[0]
    ]
    evals = lines(tmp_path / "run", "eval")
    assert found == [(line["step"], line["valid_loss"]) for line in evals]
    monkeypatch.setattr("samo.train.resolve.is_installed", lambda name: False)
    longer = with_values(RunDir(tmp_path / "run").config(), steps=3)
    resume(tmp_path / "run", config=longer)  # where it is missing
    assert wandb.init.call_count == 1


# How weights and state are kept


@pytest.fixture
def llama() -> tuple[Any, samo.Masks]:
    """A model whose matrices take more than what surrounds them."""
    model = tiny_lm("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    return model, samo.prune(model, 0.9)


@pytest.mark.parametrize(
    ("memory", "weights", "state"),
    [
        (1e9, "resident", "exact"),
        (60e6, "resident", "lean"),
        (44e6, "streamed", "exact"),
        (24e6, "streamed", "lean"),
    ],
)
def test_the_layout_is_what_fits(
    place: Path,
    llama: tuple[Any, samo.Masks],
    monkeypatch: pytest.MonkeyPatch,
    memory: float,
    weights: str,
    state: str,
) -> None:
    hardware = replace(this_hardware("cpu"), memory_bytes=memory, reserved_bytes=0)
    monkeypatch.setattr(this_machine, "this_hardware", lambda *_: hardware)
    config = resolved(place, dtype="bfloat16", batch_size=1, checkpointing=True)
    found = choose_layout(config, *llama, None, 1)
    assert found[:2] == (weights, state)
    assert found[2].startswith(f"{weights}, {state}")
    asked = resolved(place, dtype="bfloat16", weights="resident", state="lean")
    assert choose_layout(asked, *llama, None, 1) == ("resident", "lean", "")


def test_nothing_that_fits_is_an_error_with_numbers(
    place: Path, llama: tuple[Any, samo.Masks], monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = replace(this_hardware("cpu"), memory_bytes=1e6, reserved_bytes=0)
    monkeypatch.setattr(this_machine, "this_hardware", lambda *_: hardware)
    with pytest.raises(ConfigError, match=r"no layout .* takes .* MB .* of 1.00 MB .*; lower"):
        choose_layout(resolved(place), *llama, None, 1)
    other = type("OtherForCausalLM", (nn.Linear,), {})(2, 2)
    assert choose_layout(resolved(place), other, samo.Masks({}), None, 1) == (
        "resident",
        "exact",
        "resident, exact: samo plan does not know OtherForCausalLM, so nothing is predicted",
    )


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no model to fine-tune; name its folder: samo finetune my-llama"),
        ({"data": ()}, "no data to train on; name a file"),
        ({"lr": -1.0}, "--lr must be 0 or more"),
        ({"method": "sparsegpt"}, "--method has no effect without --sparsity"),
        ({"sparsity": 0.5, "masks": Path("m")}, "--sparsity has no effect with --masks .*/m;"),
        ({"sparsity": 0.0}, "--sparsity 0 prunes nothing"),
        ({"steps": 2, "epochs": 1.0}, "--steps and --epochs both say how long to train; leave"),
        ({"distill": 0.3}, "--distill has no effect without --teacher"),
        ({"fp32_gradients": True, "dtype": "float32"}, "--fp32-gradients has no effect with"),
        ({"fp32_gradients": True, "dtype": "bf16", "state": "lean"}, "lean does not work with --f"),
        ({"shard": "weights", "state": "lean"}, "--state lean does not work with --shard weights"),
        ({"shard": "weights", "weights": "4GB"}, "--weights 4000000000 has no effect with --shard"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    place: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(settings(place, **changes))


def test_a_dense_model_is_refused_with_its_zeros_and_leaves_nothing(
    place: Path, tmp_path: Path
) -> None:
    message = r"'.*dense' is not pruned: 0 of 20,480 weights .* with --sparsity 0.5 --method "
    message += r"wanda, or before with samo prune .*dense --sparsity 0.5 --method wanda --calib"
    with pytest.raises(ConfigError, match=message):
        train(settings(place, "dense"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_another_run_takes_meanwhile_is_left_alone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[RunDir] = []
    build = CausalLMSubject.new_learner

    def slow(self: Any, *args: Any) -> Any:
        others.append(RunDir.create(tmp_path / "run"))
        return build(self, *args)

    monkeypatch.setattr(CausalLMSubject, "new_learner", slow)
    with pytest.raises(RunError, match="another process is training in"):
        train(settings(place), tmp_path / "run")
    others[0].check_in_place()
    others[0].close()


def test_a_pruned_model_is_not_pruned_less(place: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nonzero weights, .* pruned already; leave --sparsity out"
    ):
        train(settings(place, sparsity=0.3), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot prune '.*': .*no-such"):
        train(settings(place, sparsity=0.7, skip=("no-such*",)), tmp_path / "run")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("name", ["norm.weight", "layers.0.mlp.up_proj.weight"])
def test_weights_that_cannot_be_trained_are_named(
    place: Path, tmp_path: Path, name: str, wrong: float
) -> None:
    folder = shutil.copytree(place / "pruned", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights[f"model.{name}"].view(-1)[5] = wrong
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    message = rf"'model\.{name}' has weights that are NaN, infinite or too large for torch.float16"
    with pytest.raises(ConfigError, match=message):
        train(settings(place, model=str(folder), dtype="fp16"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_another_vocabulary_is_refused(place: Path, tmp_path: Path) -> None:
    tiny_lm("llama", vocab_size=99).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"vocabulary of 99 tokens, the model one of 303"):
        train(settings(place, teacher=tmp_path / "other"), tmp_path / "run")


def test_models_that_read_batches_otherwise_are_refused() -> None:
    from samo.integrations.causal_lm import check_model, check_packing, context_of

    assert context_of(transformers.XLNetConfig()) is None  # which says -1
    with pytest.raises(ConfigError, match="Linear computes no loss from labels"):
        check_model(nn.Linear(2, 2))
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 16}
    same = {"num_hidden_layers": 1, "num_attention_heads": 2}
    opt = {"word_embed_proj_dim": 16, "ffn_dim": 16}
    for model in (
        transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)),  # takes no positions
        transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **same, **opt)),
        transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **same, alibi=True)),
    ):
        check_model(model)
        with pytest.raises(ConfigError, match=r"packed examples would see .* add --no-pack"):
            check_packing(model)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "mixtral"])
def test_packed_examples_stay_apart(family: str) -> None:
    from samo.integrations.causal_lm import check_packing

    changes = {} if family == "gpt2" else {"sliding_window": 2}
    model = tiny_lm(family, **changes).bfloat16()
    check_packing(model)
    assert all(param.grad is None for param in model.parameters())


def test_a_gpt_of_samo_train_is_refused(place: Path, tmp_path: Path) -> None:
    from tests.train.helpers import small

    (tmp_path / "notes.txt").write_text("word " * 900)
    train(small(tmp_path / "notes.txt", steps=4), tmp_path / "gpt")
    with pytest.raises(ConfigError, match="is a GPT of samo train; train it on with samo train"):
        CausalLMSubject(resolved(place, model=str(tmp_path / "gpt")))


def test_a_run_of_an_unknown_kind_is_refused(place: Path, tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    about = json.loads((finished / "run.json").read_text())
    for kind in (["train"], "distil"):
        (run / "run.json").write_text(json.dumps(about | {"kind": kind}))
        with pytest.raises(RunError, match=r"is of a run of 'samo .*', which this samo does not"):
            RunDir(run).config()
    with pytest.raises(RunError, match=r"resume it \(samo train --resume"):
        train(settings(place), run)
    with pytest.raises(RunError, match=r"resume it \(samo finetune --resume"):
        train(settings(place), finished)
