"""A tokenizer folder as models have them: BOS and EOS, a chat template, offsets trimmed."""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.data.trained_tokenizer import save_trained_tokenizer

BOS, START, END_OF_TURN = 300, 301, 302
"""Tokens after the 300 trained ones."""
VOCAB_SIZE: Final = 303

CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_model_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Write a tokenizer folder as transformers does."""
    save_trained_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)]),
        ]
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>"
    )
    whole.chat_template = template
    whole.save_pretrained(folder)
    return folder
