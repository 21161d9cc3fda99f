"""Rows of example files: what is accepted, and what an error says about the rest."""

import json
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from samo.data import rows
from samo.data.examples import open_examples
from samo.data.rows import Chat, Completion, Example, Text, is_example_file, read_examples
from samo.errors import DataError
from samo.integrations.model_tokenizer import ModelTokenizer
from tests.data.model_tokenizer import save_model_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "To be?"},
    {"role": "assistant", "content": "or not"},
]
ROWS: list[dict[str, Any]] = [
    {"text": "be \u20ac"},
    {"prompt": "To", "completion": " be", "id": 7},
    {"messages": MESSAGES, "prompt": "To be?"},
]
EXAMPLES: list[Example] = [Text("be \u20ac"), Completion("To", " be"), Chat(MESSAGES)]


def read(path: Path) -> list[Example]:
    return [example for _, example in read_examples(path)]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n \n"], ids=["LF", "CRLF", "blank"])
def test_json_lines_of_any_writer_are_read(tmp_path: Path, mark: bytes, end: bytes) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=number % 2 > 0) for number, row in enumerate(ROWS)]
    for last in (b"", end):
        path.write_bytes(mark + end.join(line.encode() for line in lines) + last)
        assert read(path) == EXAMPLES
    step = end.count(b"\n")
    places = [place for place, _ in read_examples(path)]
    assert places == [f"data file '{path}', line {1 + n * step}" for n in range(3)]


def test_an_assistant_may_call_a_tool(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "now"}], "content": None}
    answer = {"role": "tool", "content": "noon"}
    path = tmp_path / "a.jsonl"
    row = {"messages": [MESSAGES[0], call, answer], "tools": [{"name": "now"}], "text": "unused"}
    path.write_text(json.dumps(row))
    del call["content"]
    assert read(path) == [Chat([MESSAGES[0], call, answer], [{"name": "now"}])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "be"', r"cannot be read as JSON: Expecting ',' delimiter.*; each line must be"),
        ("text", "cannot be read as JSON: Expecting value; each line must be"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deep"),
        ("[" + "1," * 600_000 + "1]", "cannot be read as JSON: it has more than 524,288 values"),
        ('{"text": ' + "1" * 5000 + "}", "cannot be read as JSON: Exceeds the limit"),
        ('[{"text": "be"}]', r"it is a list, not an object; write each on a .* jq -c '\.\[\]'"),
        ('"be"', "it is a string, not an object; a row has 'text', 'prompt' and 'completion', or"),
        ("{}", "it has nothing; a row has 'text'"),
        ('{"Text": "be", "id": 1}', "it has 'Text', 'id'; a row has 'text', 'prompt' and"),
        ('{"prompt": "be"}', "it has 'prompt'; a row has"),
        ('{"conversations": []}', "it has 'conversations'; rename it to 'messages'"),
        ('{"instruction": "be"}', "it has 'instruction'; rename 'instruction' to 'prompt'"),
        ('{"text": null}', "it has nothing; null: 'text'; a row has"),
        ('{"prompt": "a", "completion": null}', "it has 'prompt'; null: 'completion'; a row"),
        ('{"text": 7}', "'text' is a number; it must be a string"),
        ('{"text": true}', "'text' is of type bool; it must be"),
        ('{"prompt": "be", "completion": ["x"]}', "'completion' is a list; it must be a string"),
        ('{"text": "\\ud83d"}', r"'text' has half of a surrogate pair, \\ud83d, at character 0;"),
        ('{"messages": {}}', "'messages' is an object; it must be a list of messages"),
        ('{"messages": []}', "'messages' is empty; it must have a message of the assistant"),
        ('{"messages": [{"role": "user", "content": ""}], "tools": 1}', "'tools' is a number; it"),
        *(
            (f'{{"messages": [{message}]}}', f"message 1 of 1: {problem}")
            for message, problem in [
                ('"be"', "it is a string; it must have 'role' and 'content'"),
                ('{"from": "gpt"}', "it has no 'role'; roles are system,"),
                ('{"role": "bot", "content": ""}', "it has the role 'bot'; roles are"),
                ('{"role": ["user"], "content": ""}', r"it has the role \"\['"),
                ('{"role": "user"}', "'content' is missing; it must be"),
                ('{"role": "user", "content": [1]}', "'content' is a list; it must be"),
            ]
        ),
    ],
)
def test_a_broken_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "be"}}\n\n{line}\n')
    with pytest.raises(DataError, match=f"data file '.*a.jsonl', line 3:? {message}"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "caf\xe9"}', r"', line 1 is not UTF-8: its byte 13 is 0xe9; convert the file"),
        ('{"text": "be"}'.encode("utf-16-le"), r"', line 1 is not text: its byte 1 is NUL"),
        (b"\n \r\n", "' has no examples; a row has 'text'"),
        (b"", "' is empty"),
    ],
)
def test_a_file_that_is_not_json_lines_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"data file '.*a.jsonl{message}"):
        read(path)


def test_a_line_has_a_limit_and_is_not_read_beyond_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_MAX_LINE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"text": "x" * 88}).encode())  # 100 bytes
    assert read(path) == [Text("x" * 88)]
    path.write_bytes(b'{"text": "be"}\n' + b"x" * 101)
    with pytest.raises(DataError, match=r"line 2 has more than 100 bytes; put each example on a"):
        read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    refused = mock.patch.object(Path, "open", side_effect=PermissionError(13, "Permission denied"))
    with refused, pytest.raises(DataError, match=r"'.*a.jsonl' cannot be read: Permission denied"):
        read(path)
    with pytest.raises(DataError, match=r"'.*b.jsonl' does not exist \(did you mean 'a.jsonl'\?\)"):
        read(tmp_path / "b.jsonl")


def test_500_mutated_lines_give_examples_or_named_errors(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    tokenizer = ModelTokenizer(save_model_tokenizer(tmp_path / "tokenizer"))
    rng = random.Random(0)
    good = [json.dumps(row).encode() for row in ROWS]
    pieces = [b"{", b"]", b'"', b",", b"null", b"\\u", b"\xff", b"\0", b"1e999", b"role", b"NaN"]
    path = tmp_path / "a.jsonl"
    errors = []
    for _ in range(500):
        line = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(line))
            line[place : place + rng.randint(0, 3)] = rng.choice(
                [*pieces, bytes([rng.randrange(256)])]
            )
        path.write_bytes(bytes(line) or b" ")
        try:
            list(tokenizer.encode_examples(list(read_examples(path))))
        except DataError as error:
            errors.append(str(error))
    assert 100 < len(errors) < 500
    assert all(error.startswith(f"data file '{path}'") for error in errors)


# Arrow


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(DataError, match="needs the package pyarrow: pip install pyarrow"):
            read(path)
    old = mock.Mock(__version__="14.0.0")
    monkeypatch.setitem(sys.modules, "pyarrow", old)
    with pytest.raises(DataError, match=r"needs pyarrow 15 or newer, and this is 14\.0\.0: pip"):
        read(tmp_path / "a.parquet")


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    assert is_example_file(tmp_path)
    with pytest.raises(DataError, match=r"has no state.json; pass files, such as .*/\*.jsonl, or"):
        read(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{}")
    for name in ("test", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"has the parts test, train; name one: .*/test$"):
        read(tmp_path)


def table() -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    columns = ("id", "text", "prompt", "completion", "messages")
    return pyarrow.Table.from_pylist([{key: row.get(key) for key in columns} for row in ROWS * 50])


def test_parquet_has_the_rows_of_json_lines(tmp_path: Path) -> None:
    rows = table()
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(rows, path, row_group_size=70)
    # Its schema unites the columns, so that rows have all of them, some null.
    assert read(path) == EXAMPLES * 50
    assert [place for place, _ in read_examples(path)][149] == f"data file '{path}', row 150"
    parquet.write_table(rows.select(["id"]), path)
    with pytest.raises(DataError, match=r"a.parquet', row 1: it has nothing; a row has 'text'"):
        read(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"data file '.*a.parquet' cannot be read: "):
        read(path)


def write_dataset(folder: Path, *names: str) -> None:
    """Write a table as ``save_to_disk`` does."""
    rows = table()
    import pyarrow

    for name in names:
        with pyarrow.ipc.new_stream(folder / name, rows.schema) as stream:
            stream.write_table(rows, max_chunksize=70)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_saved_dataset_needs_no_datasets(tmp_path: Path) -> None:
    write_dataset(tmp_path, "data-0.arrow", "data-1.arrow")
    assert read(tmp_path) == EXAMPLES * 100
    content = (tmp_path / "data-1.arrow").read_bytes()
    (tmp_path / "data-1.arrow").write_bytes(content[:-900])
    with pytest.raises(DataError, match=r"data file '.*data-1.arrow' cannot be read: "):
        read(tmp_path)


def test_a_saved_dataset_reads_only_its_own_files(tmp_path: Path) -> None:
    write_dataset(tmp_path, "data-0.arrow")
    (tmp_path / "link.arrow").symlink_to(tmp_path / "data-0.arrow")
    for name, message in {
        "../data-0.arrow": "'../data-0.arrow' is not the name of a file",
        "/etc/passwd": "'/etc/passwd' is not the name of a file",
        "link.arrow": "it is a link",
        "none.arrow": "No such file",
        7: "'7' is not the name of a file",
    }.items():
        state = {"_data_files": [{"filename": name}]}
        (tmp_path / "state.json").write_text(json.dumps(state))
        with pytest.raises(DataError, match=f"its state.json cannot be used .*{message}"):
            read(tmp_path)
    for content in ("[]", "{}", "nonsense"):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(DataError, match=r"its state.json cannot be used \(.*save the dataset"):
            read(tmp_path)


def test_a_dataset_of_the_package_is_opened(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    # A fingerprint is given, because the package pickles its own objects to find one.
    saved = datasets.Dataset(datasets.table.InMemoryTable(table()), fingerprint="0")
    saved.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == EXAMPLES * 50
    (tmp_path / "tokenizer").mkdir()
    tokenizer = ModelTokenizer(save_model_tokenizer(tmp_path / "tokenizer"))
    cache = tmp_path / "cache"
    opened = [
        open_examples([tmp_path / "saved"], tokenizer=tokenizer, context=64, cache=cache)
        for _ in range(2)
    ]
    assert len(opened[0]) == 150
    assert len(list(cache.iterdir())) == 1
