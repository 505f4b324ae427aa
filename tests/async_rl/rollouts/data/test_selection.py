"""What is held out is never trained on, repetitions included."""

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.rollouts.data.prompt_table import PromptTable
from async_rl.rollouts.data.prompts import Indices, select


def tables(parts: list[list[int]]) -> list[PromptTable]:
    """Prompts with these texts."""
    made = []
    for number, texts in enumerate(parts):
        table = PromptTable(f"part{number}")
        for place, text in enumerate(texts):
            table.append(place, (text,), {})
            table.arrays.keys.frombytes(blake2b(str(text).encode(), digest_size=16).digest())  # type: ignore[union-attr]
        made.append(table)
    return made


def texts_of(parts: list[list[int]], chosen: list[Indices]) -> list[int]:
    return [texts[index] for texts, indices in zip(parts, chosen, strict=True) for index in indices]


PARTS = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=40), min_size=1, max_size=3)


@settings(max_examples=200)
@given(PARTS, st.booleans(), st.one_of(st.floats(0, 0.99), st.integers(1, 20)))
def test_every_text_is_trained_on_or_held_out(parts: list[list[int]], deduplicate: bool, held_out: float) -> None:
    chosen = select(tables(parts), deduplicate=deduplicate, held_out=held_out)
    trained = texts_of(parts, chosen.trained)
    held = texts_of(parts, chosen.held_out)
    every = [text for texts in parts for text in texts]
    assert not set(trained) & set(held) and set(trained) | set(held) == set(every)
    assert len(held) == len(set(held))
    if held_out >= 1:
        assert len(held) == min(held_out, len(set(every)))
    kept = set(every) - set(held) if deduplicate else [text for text in every if text not in set(held)]
    assert Counter(trained) == Counter(kept)
    assert len(trained) + len(held) + chosen.num_repeated == len(every)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_is_about_that_share_and_does_not_depend_on_other_rows(share: float) -> None:
    texts = list(range(4000))
    (held,) = select(tables([texts]), deduplicate=False, held_out=share).held_out
    # Four standard deviations of a binomial distribution.
    assert abs(len(held) - 4000 * share) < 4 * (4000 * share * (1 - share)) ** 0.5
    (fewer,) = select(tables([texts[:1000]]), deduplicate=False, held_out=share).held_out
    assert list(fewer) == [index for index in held if index < 1000]


def test_the_first_of_several_prompts_stays_across_parts() -> None:
    chosen = select(tables([[1, 2, 1], [2, 3, 3]]), deduplicate=True, held_out=0)
    assert [list(indices) for indices in chosen.trained] == [[0, 1], [1]] and chosen.num_repeated == 3
