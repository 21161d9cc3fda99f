"""Which tokens of a conversation the assistant wrote, and a model learns."""

import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data.rows import Chat
from samo.errors import DataError, first_words

_TAGS: Final = "{% generation %} and {% endgeneration %}"
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a tokenizer: marks what the assistant says, or shows where it stands."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name: Final = name
        self._tokenizer: Final = tokenizer

    def is_tagged(self, place: str, chat: Chat) -> bool:
        """Return whether the chat template marks what the assistant says."""
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{place}: a row with 'messages' needs a chat template, and folder "
                f"'{self._name}' has none; put the chat_template.jinja of a model into it, or "
                "write 'prompt' and 'completion'"
            )
        template = self._tokenizer.get_chat_template(tools=chat.tools)
        return _GENERATION.search(template) is not None

    def tagged(self, place: str, chat: Chat) -> NDArray[np.int32]:
        """Return the tokens of a conversation, complemented unless the template marks them."""
        options = ("tokenize", "return_dict", "return_assistant_tokens_mask")
        encoded = self._apply(place, chat, **dict.fromkeys(options, True))
        tokens = np.array(encoded["input_ids"], dtype=np.int32)
        return np.where(np.array(encoded["assistant_masks"], dtype=bool), tokens, ~tokens)

    def render(self, place: str, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where in it the assistant speaks, backwards."""
        whole = self._apply(place, chat)
        turns: list[tuple[int, int]] = []
        for number, message in reversed([*enumerate(chat.messages)]):
            if message["role"] != "assistant":
                continue
            limit = turns[-1][0] if turns else len(whole)
            until = self._apply(place, chat, number + 1)
            if not number:
                raise DataError(
                    f"{place}: message 1 is of the assistant, and the chat template of "
                    f"'{self._name}' does not show where it starts; mark it with {_TAGS}, or let "
                    "the conversation start with the user"
                )
            head = self._apply(place, chat, number, add_generation_prompt=True)
            turn = _turn(whole[:limit], head, until, self._tokenizer.eos_token)
            if turn is None:
                raise DataError(
                    f"{place}: the chat template of '{self._name}' rewrites the start of a "
                    f"conversation once message {number + 1} follows, so what the assistant says "
                    f"is not known; mark it in the template with {_TAGS}, or split the "
                    "conversation"
                )
            turns.append(turn)
        return whole, turns

    def _apply(self, place: str, chat: Chat, stop: int | None = None, **options: bool) -> Any:
        """Return what the template makes of a conversation, or of its messages up to ``stop``."""
        # A template is a stranger's program. transformers runs it in jinja's
        # ImmutableSandboxedEnvironment, which gives it no way to Python's objects or to files.
        try:
            return self._tokenizer.apply_chat_template(
                chat.messages[:stop], tools=chat.tools, **{"tokenize": False, **options}
            )
        except ImportError as error:
            raise DataError(f"a chat template needs jinja2: {first_words(error)}") from None
        except Exception as error:  # a template can raise anything
            raise DataError(
                f"{place}: the chat template of '{self._name}' refuses the conversation: "
                f"{first_words(error)}"
            ) from None


def _turn(whole: str, head: str, until: str, eos: str | None) -> tuple[int, int] | None:
    """Return where a turn of the assistant stands in a conversation, or None if it is not clear.

    Args:
        whole: The conversation, up to the next turn of the assistant.
        head: What a model reads before it speaks.
        until: The conversation up to this turn, as if it were the last.
        eos: With what a model ends its turn; what the template adds after it is not learned.
    """
    start, stop = len(head), len(whole)
    if not whole.startswith(head):
        return None
    find = str.find
    if whole.startswith(until):
        stop, find = len(until), str.rfind
    end = find(whole[start:stop], eos) if eos else -1
    if end >= 0:
        assert eos is not None
        return start, start + end + len(eos)
    # Some templates rewrite a turn once others follow; then only EOS shows its end.
    return (start, stop) if whole.startswith(until) else None


def learned_tokens(turns: list[tuple[int, int]], encoding: Any) -> NDArray[np.int32]:
    """Return tokens, complemented unless they overlap a turn."""
    tokens = np.array(encoding.ids, dtype=np.int32)
    starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    is_learned = np.zeros(len(tokens), dtype=bool)
    for start, stop in turns:
        is_learned |= (stops > start) & (starts < stop)
    return np.where(is_learned, tokens, ~tokens)
