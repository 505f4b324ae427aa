"""The quickstart's task: reasoning-gym's `spell_backward`, its words in four disjoint sets, and its tokenizer.

Accuracy is measured on words that neither the warm start nor GRPO uses, so no two splits may share a word.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]

TASK = "spell_backward"
INSTRUCTION = "Spell this word backward (example: sun -> nus): "
ANSWER_MARK = "\n"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"

NUM_HELD_OUT = 1000
NUM_VALIDATION = 300
NUM_WARM_START = 20_000
NUM_PROMPTS = 12_000
NUM_DRAWS = 60_000
"""Rows drawn from the task, enough for all sets after repeated words and capitalized names are left out."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows of the task by purpose; no word is in two of them."""

    held_out: list[Row]
    validation: list[Row]
    warm_start: list[Row]
    prompts: list[Row]


def make_splits(seed: int) -> Splits:
    """Draws the task's rows and divides them; a function of `seed` alone."""
    rows = list(_unique_rows(seed))
    random.Random(seed).shuffle(rows)
    sets: list[list[Row]] = []
    for size in (NUM_HELD_OUT, NUM_VALIDATION, NUM_WARM_START, NUM_PROMPTS):
        assert len(rows) >= size, f"{NUM_DRAWS} draws gave too few different words for a set of {size}"
        sets.append(rows[:size])
        rows = rows[size:]
    return Splits(*sets)


def _unique_rows(seed: int) -> Iterator[Row]:
    """Rows with `prompt`, `answer` and `word`, each word once; capitalized names are left out."""
    seen: set[str] = set()
    for entry in reasoning_gym.create_dataset(TASK, seed=seed, size=NUM_DRAWS):
        word = entry["metadata"]["word"]
        if word in seen or not set(word) <= set(LETTERS):
            continue
        seen.add(word)
        yield {"prompt": entry["question"] + ANSWER_MARK, "answer": entry["answer"], "word": word}


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows as JSONL, creating the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter; the instruction and the mark before the answer are one token each."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, INSTRUCTION, ANSWER_MARK, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    instruction = INSTRUCTION.replace("(", "\\(").replace(")", "\\)")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{instruction}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
