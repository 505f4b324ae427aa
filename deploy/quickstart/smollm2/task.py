"""The task of `quickstart smollm2`: sums and differences of two numbers, from reasoning-gym's `chain_sum`.

Accuracy is measured on problems that neither the warm start nor GRPO uses, so no two splits share one.
"""

from collections.abc import Iterator

import reasoning_gym

from deploy.quickstart.splits import Row, Splits

TASK = "chain_sum"
SHAPE = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}

NUM_HELD_OUT = 256
NUM_VALIDATION = 128
NUM_WARM_START = 1_000
NUM_PROMPTS = 2_000
NUM_DRAWS = 10_000
"""Problems drawn from the task, enough for all sets after repeated ones are left out."""


def make_splits(seed: int) -> Splits:
    """Draws the task's rows and divides them; a function of `seed` alone."""
    return Splits.of(_unique_rows(seed), (NUM_HELD_OUT, NUM_VALIDATION, NUM_WARM_START, NUM_PROMPTS), seed)


def _unique_rows(seed: int) -> Iterator[Row]:
    """Rows with `prompt`, `answer` and `problem` ("45 - 12"), each problem once."""
    seen: set[str] = set()
    for entry in reasoning_gym.create_dataset(TASK, seed=seed, size=NUM_DRAWS, **SHAPE):
        problem = entry["question"].partition(":")[2].removesuffix("=").strip()
        if problem not in seen:
            seen.add(problem)
            yield {"prompt": entry["question"], "answer": entry["answer"], "problem": problem}
