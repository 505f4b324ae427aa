"""What ends a response: every end token that a checkpoint's tokenizer, generation config and config name.

The three often differ: a chat model's tokenizer names the end of a turn, its config the end of a text. Trainer,
embedded engine and the requests to vLLM use the union, so that a response ends at the same token wherever it is
sampled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The end tokens that each source names, ids in the vocabulary only."""

    tokenizer: frozenset[int]
    generation_config: frozenset[int]
    config: frozenset[int]
    is_default: bool = False
    """Whether those of `config` are what transformers takes for its class, since config.json names none."""

    @classmethod
    def of(
        cls,
        tokenizer: object,
        generation_config: Mapping[str, Any],
        config: Mapping[str, Any],
        vocab_size: int | None,
        *,
        config_file: Mapping[str, Any] | None = None,
    ) -> "EndTokens":
        """Of the tokenizer's `eos_token_id`, the contents of generation_config.json, and the config that transformers
        made of `config_file`, the contents of config.json; where that is not given, `config` has what it says."""
        said = config if config_file is None else config_file
        return cls(
            _ids(tokenizer, vocab_size),
            _ids(generation_config.get("eos_token_id"), vocab_size),
            _ids(config.get("eos_token_id"), vocab_size),
            "eos_token_id" not in said and "eos_token_id" not in (said.get("text_config") or {}),
        )

    @property
    def ids(self) -> tuple[int, ...]:
        """The union, ascending."""
        return tuple(sorted(self.tokenizer | self.generation_config | self.config))

    @property
    def warning(self) -> str | None:
        """What a user should know: no source names one, or none of them names all."""
        union = set(self.ids)
        if not union:
            return (
                "neither the tokenizer nor generation_config.json nor config.json names an end token (eos_token_id): "
                "responses end at rollout.max_response_tokens only; name it there, or in rollout.stop"
            )
        named = (self.tokenizer, self.generation_config, frozenset() if self.is_default else self.config)
        if union in named:
            return None
        third = f"config.json {sorted(self.config)}"
        if self.is_default:
            third = f"config.json none, for which transformers takes {sorted(self.config)}"
        return (
            f"its end tokens differ: the tokenizer names {sorted(self.tokenizer)}, generation_config.json "
            f"{sorted(self.generation_config)}, {third} (eos_token_id); each of them ends a response: name all of them "
            "in generation_config.json if that is meant, or the right one in config.json"
        )


def _ids(value: object, vocab_size: int | None) -> frozenset[int]:
    """A token id or a list of them; None and anything else name none."""
    listed: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    end = vocab_size or math.inf
    return frozenset(
        token for token in listed if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < end
    )
