"""A tokenizer of one token per character with the special tokens and the chat template of Qwen3, in short form."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.support.tiny_model import make_tiny_model, save_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
EXTRA = "<>{}[]_|#"

TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def make_chat_tokenizer(path: Path, *, template: Any = TEMPLATE) -> Any:
    """Saves it at `path`; `<|im_end|>` ends what the policy says."""
    save_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    tokenizer.add_tokens(list(EXTRA))
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return tokenizer


def make_chat_model(path: Path, family: str = "qwen3", **size: int) -> Path:
    """A tiny model at `path` with this tokenizer."""
    make_tiny_model(path, family, tied=True, vocab_size=128, max_position_embeddings=1024, **size)
    make_chat_tokenizer(path)
    return path
