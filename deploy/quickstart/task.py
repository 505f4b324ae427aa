"""The quickstart's task: reasoning-gym's `spell_backward`, its words in four disjoint sets, and its tokenizer.

Accuracy is measured on words that neither the warm start nor GRPO uses, so no two splits may share a word.
"""

from collections.abc import Iterator

import reasoning_gym
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deploy.quickstart.splits import Row, Splits

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


def make_splits(seed: int) -> Splits:
    """Draws the task's rows and divides them; a function of `seed` alone."""
    return Splits.of(_unique_rows(seed), (NUM_HELD_OUT, NUM_VALIDATION, NUM_WARM_START, NUM_PROMPTS), seed)


def _unique_rows(seed: int) -> Iterator[Row]:
    """Rows with `prompt`, `answer` and `word`, each word once; capitalized names are left out."""
    seen: set[str] = set()
    for entry in reasoning_gym.create_dataset(TASK, seed=seed, size=NUM_DRAWS):
        word = entry["metadata"]["word"]
        if word in seen or not set(word) <= set(LETTERS):
            continue
        seen.add(word)
        yield {"prompt": entry["question"] + ANSWER_MARK, "answer": entry["answer"], "word": word}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter; the instruction and the mark before the answer are one token each."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, INSTRUCTION, ANSWER_MARK, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    instruction = INSTRUCTION.replace("(", "\\(").replace(")", "\\)")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{instruction}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
