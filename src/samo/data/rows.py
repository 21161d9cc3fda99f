"""Rows of example files: JSON lines, parquet, and folders of Hugging Face's ``save_to_disk``.

{"text": "..."}                                           every token is learned
{"prompt": "...", "completion": "..."}                    the completion is learned
{"messages": [{"role": "user", "content": "..."}, ...]}   the assistant's turns are learned

A row with several of these is what stands lowest here; other columns are ignored. Files may come
from strangers; errors name the file and the line.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from samo.data import arrow_files, files
from samo.errors import DataError
from samo.utils import untrusted

COLUMNS: Final = ("text", "prompt", "completion", "messages", "tools")

_MAX_LINE_BYTES: Final = 2**26
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_JSON_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_ACCEPTED: Final = "'text', 'prompt' and 'completion', or 'messages'"


class Text(NamedTuple):
    """A document: all of it is learned."""

    text: str


class Completion(NamedTuple):
    """A prompt and what follows it: what follows is learned."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation: what the assistant says is learned."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    """Descriptions of tools, for the chat template."""


Example = Text | Completion | Chat


def num_chars(example: Example) -> int:
    """Return the length of the text of an example."""
    if isinstance(example, Chat):
        return sum(len(message.get("content", "")) for message in example.messages)
    return sum(map(len, example))


def is_example_file(path: Path) -> bool:
    """Return whether a path is for rows of examples, not for plain text or tokens."""
    return path.is_dir() or path.suffix in (*_JSON_SUFFIXES, ".parquet")


def check_readable(path: Path) -> None:
    """Raise DataError unless there is a file with content, or a folder of a dataset."""
    if path.is_dir():
        arrow_files.check_folder(path)
    else:
        files.check_readable(path)


def read_examples(path: Path) -> Iterator[tuple[str, Example]]:
    """Yield the examples of a file, each with its place for messages."""
    check_readable(path)
    unit = "row"
    if path.is_dir():
        rows = arrow_files.folder_rows(path, COLUMNS)
    elif path.suffix == ".parquet":
        rows = arrow_files.parquet_rows(path, COLUMNS)
    else:
        rows, unit = _json_rows(path), "line"
    is_empty = True
    for number, row in rows:
        is_empty = False
        try:
            example = _example(row)
        except ValueError as error:
            raise DataError(f"data file '{path}', {unit} {number:,}: {error}") from None
        yield f"data file '{path}', {unit} {number:,}", example
    if is_empty:
        raise DataError(f"data file '{path}' has no examples; a row has {_ACCEPTED}")


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with one JSON object a line, with their lines, from 1."""
    try:
        with path.open("rb") as file:
            number = 0
            # One line is held at a time, and of a longer one no more than the limit.
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line.strip():
                    yield number, _parse(line, f"data file '{path}', line {number:,}")
    except OSError as error:
        raise DataError(f"data file '{path}' cannot be read: {error.strerror}") from None


def _parse(line: bytes, place: str) -> Any:
    if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f"{place} has more than {_MAX_LINE_BYTES:,} bytes; put each example on a line of its "
            "own, and a long text into a .txt file"
        )
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} is not UTF-8: its byte {error.start:,} is 0x{line[error.start]:02x}; convert "
            "the file (iconv -t utf-8)"
        ) from None
    if 0 in line:  # in UTF-16, perhaps, which json would guess
        raise DataError(f"{place} is not text: its byte {line.index(0):,} is NUL")
    try:
        return untrusted.parse_json(line)
    except ValueError as error:
        raise DataError(
            f"{place} cannot be read as JSON: {str(error).partition(': line')[0]}; each line must "
            "be one JSON object"
        ) from None


def _example(row: object) -> Example:
    """Return what a row holds; ValueError if it is nothing known."""
    if not isinstance(row, dict):
        # A whole file of JSON may be one list of rows.
        hint = (
            "write each on a line of its own: jq -c '.[]' FILE; " if isinstance(row, list) else ""
        )
        raise ValueError(f"it is {_kind(row)}, not an object; {hint}a row has {_ACCEPTED}")
    # A column of parquet may be null in the rows that lack it.
    known = {key: value for key, value in row.items() if value is not None}
    if "messages" in known:
        tools = known.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise ValueError(f"'tools' is {_kind(tools)}; it must be a list")
        return Chat(_messages(known["messages"]), tools)
    if "prompt" in known and "completion" in known:
        return Completion(_string(known, "prompt"), _string(known, "completion"))
    if "text" in known:
        return Text(_string(known, "text"))
    found = ", ".join(f"'{str(key)[:40]}'" for key in list(known)[:8]) or "nothing"
    hint = ""
    keys = "text", "prompt", "completion", "messages"
    if nulls := [key for key in keys if key in row and key not in known]:
        hint = f"null: {', '.join(map(repr, nulls))}; "
    if "conversations" in known:
        hint = "rename it to 'messages', 'from' to 'role' and 'value' to 'content'; "
    if "instruction" in known:
        hint = "rename 'instruction' to 'prompt', and the answer to 'completion'; "
    raise ValueError(f"it has {found}; {hint}a row has {_ACCEPTED}")


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise ValueError(f"'messages' is {_kind(messages)}; it must be a list of messages")
    if not messages:
        raise ValueError("'messages' is empty; it must have a message of the assistant")
    checked = []
    for number, message in enumerate(messages, 1):
        try:
            checked.append(_message(message))
        except ValueError as error:
            raise ValueError(f"message {number} of {len(messages)}: {error}") from None
    return checked


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"it is {_kind(message)}; it must have 'role' and 'content'")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in _ROLES:
        what = "no 'role'" if role is None else f"the role {str(role)[:40]!r}"
        raise ValueError(f"it has {what}; roles are {', '.join(_ROLES)}")
    if "content" in message or not message.get("tool_calls"):
        _string(message, "content")
    return message


def _string(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"'{key}' is {_kind(value)}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"'{key}' has half of a surrogate pair, \\u{ord(value[error.start]):04x}, at character "
            f"{error.start:,}; write the whole character"
        ) from None
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", int: "a number"}
    names |= {type(None): "missing", float: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")
