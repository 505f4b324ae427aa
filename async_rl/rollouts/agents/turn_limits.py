"""How many tokens a turn may still have under the limits of its rollout, and messages must have; for `session`."""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.config.rollout_section import RolloutSection
from async_rl.rollouts.agents.messages import Message
from async_rl.rollouts.agents.turn import Limit, LimitReached

LETTERS = (string.ascii_letters + string.digits).encode()
NO_LETTERS = bytes(set(range(256)) - set(LETTERS))
ASCII = bytes(range(128))


@dataclass(frozen=True, slots=True)
class Used:
    """What a rollout has used: turns, sampled tokens, and the tokens that the next turn follows."""

    turns: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Of one rollout; `longest` is None where neither the instances nor the config limit prompt and response."""

    max_turns: int
    max_response_tokens: int
    longest: int | None

    @classmethod
    def of(cls, rollout: RolloutSection, max_response_tokens: int, max_model_len: int | None) -> "TurnLimits":
        lengths = (length for length in (max_model_len, rollout.options.max_context_tokens) if length)
        return cls(rollout.options.max_turns, max_response_tokens, min(lengths, default=None))

    def allowance(self, used: Used, asked: int | None) -> tuple[int, Limit | None]:
        """How many tokens a turn may have, and the limit that sets this number, if one does.

        Raises:
            LimitReached: none.
        """
        room: dict[Limit, float] = {
            "turns": math.inf if used.turns < self.max_turns else 0,
            "tokens": self.max_response_tokens - used.tokens,
            "context": math.inf if self.longest is None else self.longest - used.context,
        }
        limit = min(room, key=room.__getitem__)
        if room[limit] <= 0:
            settings = f"rollout.options.max_turns = {self.max_turns}, max_response_tokens = {self.max_response_tokens}"
            raise LimitReached(
                limit, f"the rollout has reached its limit of {limit} ({settings}, at most {self.longest} in all)"
            )
        if asked is not None and asked < room[limit]:
            return asked, None
        return int(room[limit]), limit


def max_letters_of(tokenizer: Any) -> int | None:
    """The most ASCII letters and digits that one of the tokenizer's tokens stands for.

    None where a token may stand for any number of them, as that of unknown words does.
    """
    model = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
    vocabulary = tokenizer.get_vocab() if model in ("BPE", "Unigram") else {}
    if not all(chr(letter) in vocabulary for letter in LETTERS):
        return None
    return max(_num_letters(token) for token in vocabulary)


def least_tokens(messages: Sequence[Message], max_letters: int | None) -> int:
    """How many tokens normalized messages have at least, by their length: milliseconds where rendering takes seconds.

    Only ASCII letters and digits count, since templates trim spaces; less one for every byte of other letters, since a
    tokenizer may make one letter of an "e" and its accent. What the policy says does not count: templates may leave its
    old thinking out.

    Args:
        max_letters: see `max_letters_of`.
    """
    if max_letters is None:
        return 0
    texts = (message["content"] for message in messages if message["role"] != "assistant")
    return sum(math.ceil(max(0, _num_letters(text) - _num_other_bytes(text)) / max_letters) for text in texts)


def _num_letters(text: str) -> int:
    return len(text.encode(errors="surrogatepass").translate(None, NO_LETTERS))


def _num_other_bytes(text: str) -> int:
    return 0 if text.isascii() else len(text.encode(errors="surrogatepass").translate(None, ASCII))
