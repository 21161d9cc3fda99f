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
GREEDY = "--temperature 0"


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
    llama: Path, format: Any, weights: str, tmp_path: Path, type_in: Any
) -> None:
    tokens, text = expected(llama, "To be", 24)
    model = open_model(llama)
    masks = open_masks(llama, model)
    folder = export(model, tmp_path / "model", format=format, source=llama, masks=masks)
    flags = f"{GREEDY} --max-tokens 24 --weights {weights} --device cpu"
    shown = type_in(f"generate {folder} --prompt 'To be' {flags}")
    assert shown.out == f"To be{plain(text)}\n"
    assert f"{len(tokens)} tokens, " in shown.err
    assert " tokens/s; prompt read in " in shown.err


def test_a_run_of_samo_finetune_writes_text(llama: Path, here: Path, type_in: Any) -> None:
    Path("notes.txt").write_text("To be, or not to be: that is the question.\n" * 60)
    flags = "--steps 2 --batch-size 2 --context 16 --eval-every 2 --eval-batches 1 --device cpu"
    type_in(f"finetune {llama} --data notes.txt --out run {flags}")
    line = f"generate run --prompt 'To be' {GREEDY} --max-tokens 12"
    dense, streamed = (type_in(f"{line} --weights {how}").out for how in ("dense", "streamed"))
    assert dense == streamed
    assert dense.startswith("To be")


def test_gpt2_continues_what_is_piped_in(
    tmp_path: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = language_model(tmp_path, "GPT2")
    _, text = expected(folder, "To be", 8)
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be\n"))
    shown = type_in(f"generate {folder} {GREEDY} --max-tokens 8").out
    assert shown == f"To be{plain(text)}\n"


def test_draws_repeat_with_a_seed_and_differ_with_another(llama: Path, type_in: Any) -> None:
    one, again, other = (type_in(f"generate {llama} --prompt To --seed {n}").out for n in (1, 1, 2))
    assert one == again != other


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
    flags = "--prompt It --max-tokens 40 --temperature 1.5"
    assert main(["generate", str(folder), *flags.split()]) == 0
    assert out.at[0] == 0  # the prompt comes before anything is computed
    assert len(set(out.at)) > 5


def test_the_prompt_is_dim_in_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Recorder(int, is_terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["generate", str(run), "--prompt", "It [b]was", "--max-tokens", "3"]) == 0
    assert out.getvalue().startswith("\x1b[2mIt [b]was\x1b[0m")


def test_a_run_of_samo_train_continues_bytes(run: Path, type_in: Any) -> None:
    flags = "--prompt 'It was' --max-tokens 40 --top-p 1 --seed 3"
    shown = type_in(f"generate {run} {flags}").out
    model = open_model(run)
    assert isinstance(model, GPT)
    prompt = list(b"It was")
    # Beyond the context, which slides.
    drawn = stream(model, torch.tensor(prompt), Sampling(40, seed=3), context=32)
    assert shown == plain(ByteTokenizer().decode([*prompt, *drawn])) + "\n"
    assert type_in(f"generate {run / 'checkpoints' / 'last'} {flags}").out == shown
    assert type_in(f"generate {run} {flags} --weights streamed").out == shown


def test_a_run_with_a_tokenizer_finds_it(here: Path, type_in: Any) -> None:
    Path("bpe").mkdir()
    save_trained_tokenizer(Path("bpe"))
    Path("notes.txt").write_text("To be, or not to be: that is the question. " * 60)
    flags = "--steps 1 --batch-size 2 --num-layers 1 --width 32 --num-heads 2 --context 32"
    flags += " --tokenizer bpe --eval-batches 1 --sample-tokens 0"
    type_in(f"train notes.txt {flags}")
    shown = type_in("generate runs/notes --prompt 'To be' --max-tokens 5")
    assert shown.out.startswith("To be")
    assert "5 tokens" in shown.err
    Path("bpe").rename("moved")
    complaint = type_in("generate runs/notes --prompt 'To be'", 1).err
    assert f"the tokenizer of 'runs/notes' is missing: no folder '{here / 'bpe'}'" in complaint
    assert "put the tokenizer back there" in complaint


@pytest.mark.parametrize(
    ("prompt", "made", "shown"),
    [
        (
            "a",  # characters of several tokens are shown whole
            [*"h\u00e9 \u20ac \U0001f642".encode(), 0xFF, 0xFF, *b"end", 0xC3],
            "ah\u00e9 \u20ac \U0001f642\ufffd\ufffdend\ufffd\n",
        ),
        ("\x1b]0;x", b"a\x1b[2Jb\x07", "?]0;xa?[2Jb?\n"),  # nothing controls the terminal
    ],
)
def test_text_is_shown_in_whole_plain_characters(
    run: Path, prompt: str, made: Any, shown: str, type_in: Any
) -> None:
    with mock.patch("samo.cli.text_model.stream", return_value=iter(made)):
        assert type_in(f"generate {run} --prompt '{prompt}'").out == shown


def test_a_chat_uses_the_template_and_remembers(
    llama: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = expected(llama, "<user>To be\n<assistant>", 6)
    _, second = expected(llama, f"<user>To be\n<assistant>{first}\n<user>or not\n<assistant>", 6)
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be\n\nor not\n"))
    shown = type_in(f"generate {llama} --chat {GREEDY} --max-tokens 6").out
    assert shown == f"> To be\n{plain(first)}\n> or not\n{plain(second)}\n"


def test_ctrl_c_stops_one_answer_and_the_chat_goes_on(
    llama: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
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
    assert "1 token, stopped" in type_in(f"generate {llama} --chat").err
    assert asked[1][1] == {"role": "assistant", "content": "half an"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--prompt ''", 2, "the prompt is empty; pass some text with --prompt"),
        ("--top-p 0 --prompt x", 2, "--top-p must be more than 0 and at most 1, got 0"),
        ("--max-tokens 0 --prompt x", 2, "--max-tokens must be 1 or more"),
        ("--temperature -1 --prompt x", 2, "--temperature must be 0 or more"),
        ("--chat --prompt x", 2, "--chat reads messages line by line; leave out --prompt"),
        (
            f"--prompt '{'To be ' * 200}'",
            1,
            "tokens, and the model reads 64 with its answer; shorten the prompt",
        ),
        ("--prompt x --device cuda", 2, "--device cuda needs a GPU"),
    ],
)
def test_what_cannot_be_generated_is_told(
    llama: Path, words: str, code: int, message: str, type_in: Any
) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        shown = type_in(f"generate {llama} {words}", code)
    assert message in shown.err
    assert shown.out == ""


def test_no_prompt_and_no_template_are_told(
    run: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = type_in(f"generate {run} --chat", 2).err
    assert "run' has no chat template, so its model was not made to chat" in shown
    monkeypatch.setattr(sys, "stdin", Recorder(int, is_terminal=True))
    shown = type_in(f"generate {run}", 2).err
    assert "no prompt; pass --prompt TEXT, pipe a text in, or use --chat" in shown
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * (2**24 + 1)))
    assert "the prompt has more than 16,777,216 characters" in type_in(f"generate {run}", 1).err


def test_folders_that_do_not_fit_are_told(tmp_path: Path, type_in: Any) -> None:
    folder = language_model(tmp_path / "m", template="{{ raise_exception('no system\nline two') }}")

    def complaint(flags: str = "", code: int = 1) -> str:
        return str(type_in(f"generate {folder} --prompt 'To be' {flags}", code).err)

    with mock.patch.object(sys, "stdin", io.StringIO("hello\n")):
        found = type_in(f"generate {folder} --chat", 1).err
    assert "cannot write this conversation: no system; use --prompt" in found
    settings = json.loads((folder / "generation_config.json").read_text())
    for wrong in ({"min_p": 7.0}, {"eos_token_id": 2**63}):
        (folder / "generation_config.json").write_text(json.dumps(settings | wrong))
        assert "cannot generate text: " in complaint()
    for fine in ({"eos_token_id": list[int]()}, {"stop_strings": ["be"]}):
        (folder / "generation_config.json").write_text(json.dumps(settings | fine))
        complaint(code=0)
    (folder / "masks.safetensors").unlink()
    model = open_model(folder)
    for param in model.parameters():
        torch.nn.init.ones_(param)
    model.save_pretrained(folder)
    found = complaint("--weights streamed", 2)
    assert "--weights streamed needs a pruned model: the model is not pruned" in found
    with mock.patch("samo.cli.generate.model_folders.open_model", side_effect=MemoryError("9 GB")):
        assert "out of memory: 9 GB; use --weights streamed" in complaint()
    (folder / "tokenizer.json").write_text("{}")
    assert "has a tokenizer that cannot be read" in complaint()
    for file in (*folder.glob("*token*"), folder / "chat_template.jinja"):
        file.unlink()
    assert "has no tokenizer" in complaint()


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path, type_in: Any, run: Path) -> None:
    pruned("Llama", 0.8)[0].save_pretrained(tmp_path)  # 64 tokens
    save_trained_tokenizer(tmp_path)
    shown = type_in(f"generate {tmp_path} --prompt 'To be'", 1).err
    assert "and the model knows 64 tokens; the tokenizer is not" in shown
    small = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32, vocab_size=100))
    with mock.patch("samo.cli.generate.model_folders.open_model", return_value=small):
        shown = type_in(f"generate {run} --prompt it", 1).err
    assert "the text has token 116, and the model knows 100" in shown


@pytest.mark.parametrize("how", ["", GREEDY])
def test_a_model_that_predicts_nothing_is_told(
    llama: Path, tmp_path: Path, how: str, type_in: Any
) -> None:
    folder = shutil.copytree(llama, tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("inf")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    shown = type_in(f"generate {folder} --prompt 'To be' {how}", 1).err
    assert "the model's predictions are NaN or infinite; look for" in shown


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
