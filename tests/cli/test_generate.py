"""``samo generate``: the text that a model continues, and how it is shown."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from samo.cli.main import main
from samo.data.tokenizers import ByteTokenizer
from samo.errors import CheckpointError
from samo.integrations.export import export
from samo.integrations.model_folders import open_masks, open_model
from samo.models.generate import Sampling, stream
from samo.models.gpt import GPT, GPTConfig
from samo.utils.formatting import plain
from tests.data.trained_tokenizer import VOCAB_SIZE, save_trained_tokenizer
from tests.integrations.cases import pruned

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = ["--temperature", "0"]


def language_model(folder: Path, family: str = "Llama", template: str | None = None) -> Path:
    """Write a pruned model with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model, masks = pruned(family, 0.8, vocab_size=VOCAB_SIZE, max_position_embeddings=64, **ends)
    model.save_pretrained(folder)
    masks.save(folder / "masks.safetensors")
    save_trained_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return language_model(tmp_path_factory.mktemp("llama"), template=TEMPLATE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``samo train`` on bytes."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "notes.txt").write_text("It was the best of times, it was the worst. " * 60)
    flags = "--steps 2 --batch-size 2 --num-layers 1 --width 32 --num-heads 2 --context 32"
    flags += " --eval-every 2 --eval-batches 1 --sample-tokens 0 --dense-steps 1"
    assert (
        main(["train", str(folder / "notes.txt"), "--out", str(folder / "r"), *flags.split()]) == 0
    )
    return folder / "r"


def expected(folder: Path, prompt: str, tokens: int) -> tuple[list[int], str]:
    """Return what ``model.generate`` of transformers adds to a prompt, greedily."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    made = open_model(folder).generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :]
    return made.tolist(), tokenizer.decode(made, skip_special_tokens=True)


@pytest.mark.parametrize("weights", ["dense", "streamed"])
@pytest.mark.parametrize("format", ["dense", "compressed"])
def test_greedy_text_is_that_of_transformers(
    llama: Path, format: Any, weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, text = expected(llama, "To be", 24)
    model = open_model(llama)
    masks = open_masks(llama, model)
    folder = export(model, tmp_path / "model", format=format, source=llama, masks=masks)
    capsys.readouterr()
    flags = ["--prompt", "To be", *GREEDY, "--max-tokens", "24", "--weights", weights]
    assert main(["generate", str(folder), *flags, "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"To be{plain(text)}\n"
    assert f"{len(tokens)} tokens, " in shown.err
    assert " tokens/s; prompt read in " in shown.err


def test_a_run_of_samo_finetune_writes_text(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, run = tmp_path / "notes.txt", str(tmp_path / "run")
    notes.write_text("To be, or not to be: that is the question.\n" * 60)
    flags = "--steps 2 --batch-size 2 --context 16 --eval-every 2 --eval-batches 1 --device cpu"
    words = ["finetune", str(llama), "--data", str(notes), "--out", run, *flags.split()]
    assert main(words) == 0
    capsys.readouterr()
    shown = []
    for weights in ("dense", "streamed"):
        words = ["--prompt", "To be", *GREEDY, "--max-tokens", "12", "--weights", weights]
        assert main(["generate", run, *words]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].startswith("To be")


def test_gpt2_continues_what_is_piped_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = language_model(tmp_path, "GPT2")
    _, text = expected(folder, "To be", 8)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be\n"))
    assert main(["generate", str(folder), "--temperature", "0", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"To be{plain(text)}\n"


def test_draws_repeat_with_a_seed_and_differ_with_another(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(seed: str) -> str:
        assert main(["generate", str(llama), "--prompt", "To", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert text("1") == text("1") != text("2")


class Recorder(io.StringIO):
    """Remembers how often the model had run at each write."""

    def __init__(self, count: Callable[[], int], *, is_terminal: bool = False) -> None:
        super().__init__()
        self.count, self.is_terminal = count, is_terminal
        self.at: list[int] = []

    def write(self, text: str) -> int:
        if text:
            self.at.append(self.count())
        return super().write(text)

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("name", ["run", "llama"])
def test_text_appears_while_it_is_made(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(name)
    calls = 0
    forward = GPT.forward if name == "run" else type(open_model(folder)).forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(GPT if name == "run" else type(open_model(folder)), "forward", counted)
    out = Recorder(lambda: calls)
    monkeypatch.setattr(sys, "stdout", out)
    prompt = ["--prompt", "It was", "--max-tokens", "40", "--temperature", "1.5"]
    assert main(["generate", str(folder), *prompt]) == 0
    assert out.at[0] == 0  # the prompt comes before anything is computed
    assert len(set(out.at)) > 5


def test_the_prompt_is_dim_in_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Recorder(int, is_terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["generate", str(run), "--prompt", "It [b]was", "--max-tokens", "3"]) == 0
    assert out.getvalue().startswith("\x1b[2mIt [b]was\x1b[0m")


def test_a_run_of_samo_train_continues_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "It was", "--max-tokens", "40", "--top-p", "1", "--seed", "3"]
    assert main(["generate", str(run), *flags]) == 0
    shown = capsys.readouterr().out
    model = open_model(run)
    assert isinstance(model, GPT)
    prompt = list(b"It was")
    # Beyond the context, which slides.
    drawn = stream(model, torch.tensor(prompt), Sampling(40, seed=3), context=32)
    assert shown == plain(ByteTokenizer().decode([*prompt, *drawn])) + "\n"
    assert main(["generate", str(run / "checkpoints" / "best"), *flags[:4]]) == 0
    assert main(["generate", str(run), *flags, "--weights", "streamed"]) == 0
    assert capsys.readouterr().out.endswith(shown)


def test_a_run_with_a_tokenizer_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bpe").mkdir()
    save_trained_tokenizer(Path("bpe"))
    Path("notes.txt").write_text("To be, or not to be: that is the question. " * 60)
    flags = "--steps 1 --batch-size 2 --num-layers 1 --width 32 --num-heads 2 --context 32"
    flags += " --tokenizer bpe --eval-batches 1 --sample-tokens 0"
    assert main(["train", "notes.txt", *flags.split()]) == 0
    capsys.readouterr()
    assert main(["generate", "runs/notes", "--prompt", "To be", "--max-tokens", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("To be")
    assert "5 tokens" in shown.err
    Path("bpe").rename("moved")
    assert main(["generate", "runs/notes", "--prompt", "To be"]) == 1
    complaint = capsys.readouterr().err
    assert f"the tokenizer of 'runs/notes' is missing: no folder '{tmp_path / 'bpe'}'" in complaint
    assert "put the tokenizer back there" in complaint


def test_characters_of_several_tokens_are_shown_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [*"h\u00e9 \u20ac \U0001f642".encode(), 0xFF, 0xFF, *b"end", 0xC3]
    with mock.patch("samo.cli.text_model.stream", return_value=iter(made)):
        assert main(["generate", str(run), "--prompt", "a"]) == 0
    assert capsys.readouterr().out == "ah\u00e9 \u20ac \U0001f642\ufffd\ufffdend\ufffd\n"


def test_a_chat_uses_the_template_and_remembers(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = expected(llama, "<user>To be\n<assistant>", 6)
    _, second = expected(llama, f"<user>To be\n<assistant>{first}\n<user>or not\n<assistant>", 6)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be\n\nor not\n"))
    assert main(["generate", str(llama), "--chat", *GREEDY, "--max-tokens", "6"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"> To be\n{plain(first)}\n> or not\n{plain(second)}\n"


def test_ctrl_c_stops_one_answer_and_the_chat_goes_on(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from samo.integrations.generation import HuggingFaceText

    asked: list[Any] = []

    def answer(self: Any, tokens: Any, how: Any, on_token: Any, write: Any) -> None:
        on_token()
        write("half an")
        if len(asked) == 1:
            raise KeyboardInterrupt

    def ask(self: Any, messages: Any) -> torch.Tensor:
        asked.append([dict(message) for message in messages])
        return torch.ones(3, dtype=torch.int64)

    monkeypatch.setattr(HuggingFaceText, "stream", answer)
    monkeypatch.setattr(HuggingFaceText, "encode_chat", ask)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["generate", str(llama), "--chat"]) == 0
    assert asked[1][1] == {"role": "assistant", "content": "half an"}
    assert "1 token, stopped" in capsys.readouterr().err


def test_a_model_cannot_control_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("samo.cli.text_model.stream", return_value=iter(b"a\x1b[2Jb\x07")):
        assert main(["generate", str(run), "--prompt", "\x1b]0;x"]) == 0
    assert capsys.readouterr().out == "?]0;xa?[2Jb?\n"


def break_file(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--prompt ''", 2, "the prompt is empty; pass some text with --prompt"),
        ("--top-p 0 --prompt x", 2, "--top-p must be more than 0 and at most 1, got 0"),
        ("--max-tokens 0 --prompt x", 2, "--max-tokens must be 1 or more"),
        ("--temperature -1 --prompt x", 2, "--temperature must be 0 or more"),
        ("--chat --prompt x", 2, "--chat reads messages line by line; leave out --prompt"),
        ("--prompt LONG", 1, "tokens, and the model reads 64 with its answer; shorten the prompt"),
        ("--prompt x --device cuda", 2, "--device cuda needs a GPU"),
    ],
)
def test_what_cannot_be_generated_is_told(
    llama: Path, words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [{"''": "", "LONG": "To be " * 200}.get(word, word) for word in words.split()]
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert main(["generate", str(llama), *given]) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_no_prompt_and_no_template_are_told(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", str(run), "--chat"]) == 2
    assert "r' has no chat template, so its model was not made to chat" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Recorder(int, is_terminal=True))
    assert main(["generate", str(run)]) == 2
    assert "no prompt; pass --prompt TEXT, pipe a text in, or use --chat" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * (2**24 + 1)))
    assert main(["generate", str(run)]) == 1
    assert "the prompt has more than 16,777,216 characters" in capsys.readouterr().err


def test_folders_that_do_not_fit_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = language_model(tmp_path / "m", template="{{ raise_exception('no system\nline two') }}")

    def complaint(*flags: str) -> str:
        assert main(["generate", str(folder), *flags]) in (1, 2)
        return capsys.readouterr().err

    with mock.patch.object(sys, "stdin", io.StringIO("hello\n")):
        assert "cannot write this conversation: no system; use --prompt" in complaint("--chat")
    break_file(folder, "generation_config.json", lambda found: found.update(min_p=7.0))
    assert "cannot generate text: " in complaint("--prompt", "To be")
    huge = {"min_p": None, "eos_token_id": 2**63}
    break_file(folder, "generation_config.json", lambda found: found.update(huge))
    assert "cannot generate text: " in complaint("--prompt", "To be")
    (folder / "masks.safetensors").unlink()
    model = open_model(folder)
    for param in model.parameters():
        torch.nn.init.ones_(param)
    model.generation_config.min_p = None
    model.save_pretrained(folder)
    found = complaint("--prompt", "To be", "--weights", "streamed")
    assert "--weights streamed needs a pruned model: the model is not pruned" in found
    with mock.patch("samo.cli.generate.model_folders.open_model", side_effect=MemoryError("9 GB")):
        assert "out of memory: 9 GB; use --weights streamed" in complaint("--prompt", "To be")
    (folder / "tokenizer.json").write_text("{}")
    assert "has a tokenizer that cannot be read" in complaint("--prompt", "To be")
    for file in (*folder.glob("*token*"), folder / "chat_template.jinja"):
        file.unlink()
    assert "has no tokenizer" in complaint("--prompt", "To be")


def test_a_tokenizer_of_another_model_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    pruned("Llama", 0.8)[0].save_pretrained(tmp_path)  # 64 tokens
    save_trained_tokenizer(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "To be"]) == 1
    assert "and the model knows 64 tokens; the tokenizer is not" in capsys.readouterr().err
    small = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32, vocab_size=100))
    with mock.patch("samo.cli.generate.model_folders.open_model", return_value=small):
        assert main(["generate", str(run), "--prompt", "it"]) == 1
    assert "the text has token 116, and the model knows 100" in capsys.readouterr().err


@pytest.mark.parametrize("how", [[], GREEDY])
def test_a_model_that_predicts_nothing_is_told(
    llama: Path, tmp_path: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(llama, tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("inf")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert main(["generate", str(folder), "--prompt", "To be", *how]) == 1
    assert "the model's predictions are NaN or infinite; look for" in capsys.readouterr().err


# Drawing tokens


class Fixed(torch.nn.Module):
    """Gives tokens 0 to 3 the probabilities 0.4, 0.3, 0.2 and 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([0.4, 0.3, 0.2, 0.1]).log())

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens_BT.shape, 4)


@pytest.mark.parametrize(
    ("top_p", "drawn"), [(0.3, {0}), (0.4, {0}), (0.5, {0, 1}), (0.8, {0, 1, 2}), (1, {0, 1, 2, 3})]
)
def test_tokens_are_drawn_from_the_likeliest(top_p: float, drawn: set[int]) -> None:
    how = Sampling(200, 1.0, top_p, seed=0)
    model = Fixed().train()
    assert {*stream(model, torch.zeros(1, dtype=torch.int64), how, context=1)} == drawn
    assert model.training
    counts = np.bincount([*stream(model, torch.zeros(1, dtype=torch.int64), how, context=1)])
    assert (np.diff(counts) < 0).all()  # by their probabilities


def test_what_is_not_finite_cannot_be_drawn_from_but_tokens_may_be_ruled_out() -> None:
    model, start = Fixed(), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        model.logits[1:] = -torch.inf
    assert [*stream(model, start, Sampling(3), context=1)] == [0] * 3
    for wrong in (torch.inf, torch.nan):
        with torch.no_grad():
            model.logits[1] = wrong
        with pytest.raises(CheckpointError, match="predictions are NaN or infinite"):
            next(stream(model, start, Sampling(3), context=1))


def test_temperature_zero_takes_the_likeliest() -> None:
    found = [*stream(Fixed(), torch.zeros(1, dtype=torch.int64), Sampling(5, 0.0), context=1)]
    assert found == [0] * 5
