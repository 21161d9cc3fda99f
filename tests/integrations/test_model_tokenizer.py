"""Examples as a model reads them: BOS, EOS, chat templates, and what is learned."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samo.data.rows import Chat, Completion, Example, Text
from samo.errors import CheckpointError, DataError
from samo.integrations.model_tokenizer import ModelTokenizer
from tests.data.model_tokenizer import (
    BOS,
    CHATML,
    END_OF_TURN,
    START,
    TAGGED,
    VOCAB_SIZE,
    save_model_tokenizer,
)

CHAT = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "To be?"},
    {"role": "assistant", "content": "not\n\nto be \u20ac"},
    {"role": "user", "content": "or"},
    {"role": "assistant", "content": "nobler"},
]


def open_tokenizer(folder: Path, template: str | None = CHATML) -> ModelTokenizer:
    return ModelTokenizer(save_model_tokenizer(folder, template))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(tokenizer: ModelTokenizer, *examples: Example) -> list[list[int]]:
    placed = [(f"line {number}", example) for number, example in enumerate(examples, 1)]
    return [array.tolist() for array in tokenizer.encode_examples(placed)]


def only_read(tokenizer: ModelTokenizer, *parts: int | str) -> list[int]:
    return [~token for token in learned(tokenizer, *parts)]


def learned(tokenizer: ModelTokenizer, *parts: int | str) -> list[int]:
    found: list[int] = []
    for part in parts:
        found += [part] if isinstance(part, int) else tokenizer.encode(part).tolist()
    return found


def test_a_text_has_bos_and_eos_once(tokenizer: ModelTokenizer) -> None:
    expected = [~BOS, *learned(tokenizer, "To be,", END_OF_TURN)]
    assert encode(tokenizer, Text("To be,"), Text("<s>To be,<|im_end|>")) == [
        expected,
        [BOS, *expected[1:]],  # the first token is never predicted, so its mark does not matter
    ]
    assert tokenizer.encode("To be,").tolist() == tokenizer._tokenizer("To be,").input_ids[1:]
    assert tokenizer.decode(tokenizer.encode("To be \u20ac")) == "To be \u20ac"
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_of_a_completion_the_prompt_is_only_read(tokenizer: ModelTokenizer) -> None:
    assert len(tokenizer.encode("be")) == 1, "a token spans the border of the last"
    for prompt, completion in (("To be,", " or not"), ("", "or"), ("b", "e")):
        assert encode(tokenizer, Completion(prompt, completion)) == [
            only_read(tokenizer, BOS, prompt) + learned(tokenizer, completion, END_OF_TURN)
        ]


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["by prefixes", "by tags"])
def test_of_a_conversation_the_turns_of_the_assistant_are_learned(
    tmp_path: Path, template: str
) -> None:
    tokenizer = open_tokenizer(tmp_path, template)
    head = ("\n", START, "assistant\n")
    (found,) = encode(tokenizer, Chat(CHAT))
    assert found == [
        *only_read(tokenizer, START, "system\nbe", END_OF_TURN),
        *only_read(tokenizer, "\n", START, "user\nTo be?", END_OF_TURN, *head),
        *learned(tokenizer, "not\n\nto be \u20ac", END_OF_TURN),
        *only_read(tokenizer, "\n", START, "user\nor", END_OF_TURN, *head),
        *learned(tokenizer, "nobler", END_OF_TURN),
        *only_read(tokenizer, "\n"),
    ]


def test_examples_of_all_kinds_stay_in_order(tokenizer: ModelTokenizer) -> None:
    kinds: list[Example] = [Chat(CHAT[1:3]), Text("be"), Completion("a", "b"), Chat(CHAT[3:])]
    assert encode(tokenizer, *kinds) == [encode(tokenizer, kind)[0] for kind in kinds]


def test_a_conversation_without_the_assistant_has_nothing_to_learn(
    tokenizer: ModelTokenizer,
) -> None:
    (found,) = encode(tokenizer, Chat(CHAT[:2]))
    assert all(token < 0 for token in found)


SHORTENED = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'assistant' or loop.last else m.content.split('\n')[-1] }}",
)
WITHOUT_EOS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (SHORTENED, ["to be \u20ac<|im_end|>", "nobler<|im_end|>"]),
        (WITHOUT_EOS, [" not\n\nto be \u20ac\n", " nobler\n"]),
    ],
    ids=["earlier turns are shortened", "a turn ends where the next message starts"],
)
def test_the_end_of_a_turn_is_found(tmp_path: Path, template: str, parts: list[str]) -> None:
    tokenizer = open_tokenizer(tmp_path, template)
    (found,) = encode(tokenizer, Chat(CHAT))
    runs = itertools.groupby(found, lambda token: token >= 0)
    said = [tokenizer.decode(np.array([*run])) for is_learned, run in runs if is_learned]
    assert said == parts


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + CHATML,
        # The first turn differs, and nothing marks its end.
        "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %} {% endfor %}",
    ],
)
def test_a_template_without_clear_turns_is_refused(tmp_path: Path, template: str) -> None:
    message = r"line 1: the chat template of '.*' rewrites the start .* once message [35] follows"
    with pytest.raises(DataError, match=message):
        encode(open_tokenizer(tmp_path, template), Chat(CHAT))


def test_a_conversation_that_starts_with_the_assistant_needs_tags(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: message 1 is of the assistant, and the"):
        encode(open_tokenizer(tmp_path), Chat(CHAT[2:]))
    tokenizer = open_tokenizer(tmp_path, TAGGED)
    (found,) = encode(tokenizer, Chat(CHAT[2:]))
    start = only_read(tokenizer, START, "assistant\n")
    assert found[: len(start) + 1] == start + learned(tokenizer, "not")[:1]


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, None)
    with pytest.raises(
        DataError, match=r"line 1: a row with 'messages' needs a chat template, and folder"
    ):
        encode(tokenizer, Chat(CHAT))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
        ("{% include 'x' %}", "no loader"),
        ("{% for %}", "Expected"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_runs_in_a_sandbox_and_its_errors_are_named(
    tmp_path: Path, template: str, message: str
) -> None:
    tokenizer = open_tokenizer(tmp_path, template)
    with pytest.raises(DataError, match=f"line 1: the chat template of .* refuses .*{message}"):
        encode(tokenizer, Chat(CHAT))


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, "{{ tools[0].name }}: " + CHATML)
    (found,) = encode(tokenizer, Chat(CHAT[1:3], [{"name": "be"}]))
    assert found[: len(tokenizer.encode("be: "))] == only_read(tokenizer, "be: ")
    with pytest.raises(DataError, match=r"line 1: the chat template of .* refuses .*Tools should"):
        encode(tokenizer, Chat(CHAT[1:3], ["be"]))


# Folders


def test_a_fingerprint_tells_contents_not_places(tmp_path: Path) -> None:
    first = save_model_tokenizer(tmp_path)
    again = Path(shutil.copytree(first, tmp_path / "again"))
    assert ModelTokenizer(first).fingerprint == ModelTokenizer(again).fingerprint
    (again / "chat_template.jinja").write_text(TAGGED)
    assert ModelTokenizer(first).fingerprint != ModelTokenizer(again).fingerprint


def edit(folder: Path, name: str, change: Callable[[Any], object]) -> Path:
    """Change the JSON of a file of a new tokenizer; return its folder."""
    file = save_model_tokenizer(folder) / name
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file.parent


def test_what_a_tokenizer_file_says_of_length_is_not_followed(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    folder = edit(tmp_path, "tokenizer.json", lambda found: found.update(truncation=cut))
    (found,) = encode(ModelTokenizer(folder), Text("nobler question"))
    assert len(found) > 4


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*none' is not a folder; name a Hugging Face model"):
        ModelTokenizer(tmp_path / "none")
    with pytest.raises(DataError, match=r"folder '.*' has no tokenizer; copy the tokenizer files"):
        ModelTokenizer(tmp_path)
    save_model_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match="has a tokenizer that cannot be read: "):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="link"):
        ModelTokenizer(tmp_path)


def test_a_token_too_large_for_the_cache_is_refused(tmp_path: Path) -> None:
    huge = {"huge": 2**31 - 1}
    folder = edit(tmp_path, "tokenizer.json", lambda found: found["model"]["vocab"].update(huge))
    with pytest.raises(DataError, match="cannot be read: it has the token 2,147,483,647"):
        ModelTokenizer(folder)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    folder = edit(tmp_path, "tokenizer_config.json", lambda found: found.update(own))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(DataError, match="cannot be read"):
        ModelTokenizer(folder)
    assert not (tmp_path / "ran").exists()
