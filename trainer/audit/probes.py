"""What an audit asks an engine: texts and random tokens as prompts, and how many responses of which length.

Texts meet the model where it is used; random tokens reach the whole vocabulary, and give responses of high entropy,
which tell most about how tokens are drawn.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from trainer.audit.engine import Ask

TEXTS = (
    "The harbour was quiet that morning, and the two boats that had come in overnight lay side by side. The older one",
    "To find the area of a triangle, multiply the base by the height and divide by two. A base of 6 and a height of 9",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Question: A train leaves at 9:40 and needs 85 minutes. When does it arrive?\nAnswer: It arrives at",
    "Dear Sir or Madam,\n\nI am writing about the invoice of 3 March, number 2217, which",
    "The three states of matter that everybody knows are solid, liquid and",
    "SELECT name, COUNT(*) FROM orders WHERE year = 2021 GROUP BY",
    "1, 1, 2, 3, 5, 8, 13,",
)
MESSAGES = ({"role": "user", "content": "Name a colour. Answer with one word."},)
"""Rendered with the model's chat template: the response soon ends."""

MAX_PROMPT = 48
RESPONSE = 64
NUM_RANDOM = 8
REPEATS = 2
"""Responses to each prompt, in requests of their own: several workers behind one address each get some."""

TEMPERATURES = (1.0, 0.7)
CACHED_PROMPT = 192
"""Engines keep prefixes in blocks of 16 to 128 tokens."""
CACHED_RESPONSE = 32
NUM_CACHED = 5
MAX_LONG = 4096
NUM_LONG = 2
LONG_RESPONSE = 16
LEAST_LENGTH = 24
"""Of prompt and response, or an engine is too short for any of it."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Requests by what they are for."""

    by_temperature: Mapping[float, Sequence[Ask]]
    long: Sequence[Ask]
    """Beyond a window or the positions that a rope was made for; none where the model has neither."""
    cached: Sequence[Ask]
    """Sent before and after an update."""


def make_probes(
    texts: Sequence[Sequence[int]],
    vocab_size: int,
    max_length: int,
    needed_length: int,
    temperatures: Sequence[float],
    avoided: frozenset[int],
) -> Probes:
    """The same in each audit of a model.

    Args:
        texts: `TEXTS` and `MESSAGES` as tokens, none without a tokenizer.
        max_length: of prompt and response.
        needed_length: of a prompt that shows windows and ropes; 0 for any.
        avoided: ids that random prompts leave out, such as end tokens.

    Raises:
        ConfigError: `max_length` is too short for probes.
    """
    if max_length < LEAST_LENGTH:
        raise ConfigError(f"the engine takes {max_length} tokens of prompt and response: an audit needs {LEAST_LENGTH}")
    rng = random.Random(0)
    ids = [token for token in range(vocab_size) if token not in avoided]
    length = min(MAX_PROMPT, max_length // 2)
    response = min(RESPONSE, max_length - length)
    prompts = [tuple(text[-length:]) for text in texts if text]
    prompts += [tuple(rng.choices(ids, k=length)) for _ in range(2 * NUM_RANDOM - len(prompts))]
    by_temperature = {
        temperature: [
            Ask(prompt, response, temperature)
            # Others than the main temperature only tell whether it is applied.
            for prompt in (prompts if place == 0 else prompts[::2])
            for _ in range(REPEATS)
        ]
        for place, temperature in enumerate(temperatures)
    }
    long_length = min(needed_length, MAX_LONG, max_length - LONG_RESPONSE)
    long = []
    if long_length > length:
        long = [Ask(tuple(rng.choices(ids, k=long_length)), LONG_RESPONSE, temperatures[0]) for _ in range(NUM_LONG)]
    cached_length = min(CACHED_PROMPT, max_length - CACHED_RESPONSE)
    cached = [
        Ask(tuple(rng.choices(ids, k=max(1, cached_length))), min(CACHED_RESPONSE, max_length // 2), temperatures[0])
        for _ in range(NUM_CACHED)
        for _ in range(REPEATS)
    ]
    return Probes(by_temperature, long, cached)


def needed_length(config: Mapping[str, Any]) -> int:
    """Tokens of a prompt after which a window, or a rope of another length, shows; 0 where there is neither."""
    window = config.get("sliding_window") or 0
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [rope, *(own for own in rope.values() if isinstance(own, Mapping))]
    original = max((own.get("original_max_position_embeddings") or 0 for own in ropes), default=0)
    beyond = max(int(window), int(original))
    return beyond + LONG_RESPONSE if beyond else 0
