"""Digests of a table say where two differ; places are those of any sequence. More is in test_prompts.py."""

from random import Random

import pytest

from async_rl.rollouts.data.prompt_table import NUM_RANGES, PromptTable


def table_of(rows: list[tuple[int, list[int], dict[str, int]]]) -> PromptTable:
    table = PromptTable()
    for number, tokens, row in rows:
        table.append(number, tokens, row)
    return table


def rows_of(num: int) -> list[tuple[int, list[int], dict[str, int]]]:
    rng = Random(num)
    return [(3 * i, [rng.randrange(100) for _ in range(rng.randrange(4))], {"a": i}) for i in range(num)]


@pytest.mark.parametrize("num", [0, 1, 2, NUM_RANGES - 1, NUM_RANGES, NUM_RANGES + 1, 500])
def test_digests_cover_every_prompt_once_in_so_many_stretches(num: int) -> None:
    digests = table_of(rows_of(num)).digests()
    assert len(digests) == min(num, NUM_RANGES)
    stretches = [tuple(map(int, name.split(" to "))) for name in digests]
    assert [number for first, last in stretches for number in range(first, last + 1, 3)] == list(range(0, 3 * num, 3))


@pytest.mark.parametrize("what", ["number", "token", "row", "a token moved to the next prompt", "two swapped"])
def test_any_change_shows_in_the_stretch_that_it_is_in(what: str) -> None:
    for place in (0, 250, 498):
        rows = rows_of(500)
        number, tokens, row = rows[place] = (rows[place][0], [1, 2, 3], rows[place][2])
        before = table_of(rows).digests()
        match what:
            case "number":
                rows[place] = (number + 1, tokens, row)
            case "token":
                rows[place] = (number, [1, 2, 4], row)
            case "row":
                rows[place] = (number, tokens, {"a": -1})
            case "two swapped":
                rows[place], rows[place + 1] = rows[place + 1], rows[place]
            case _:
                rows[place] = (number, tokens[:-1], row)
                rows[place + 1] = (rows[place + 1][0], [3, *rows[place + 1][1]], rows[place + 1][2])
        after = table_of(rows).digests()
        changed = [at for at, (old, new) in enumerate(zip(before.items(), after.items(), strict=True)) if old != new]
        first = place * NUM_RANGES // 500
        assert changed and set(changed) <= {first, first + 1}


def test_places_are_those_of_a_list() -> None:
    for num in (0, 1, 7):
        table, numbers = table_of(rows_of(num)), [str(3 * i) for i in range(num)]
        assert table.numbers == [3 * i for i in range(num)] and [p.prompt_id for p in table] == numbers
        for place in (slice(None), slice(1, -1), slice(None, None, -2), slice(3, 1), slice(-100, 100)):
            assert [p.prompt_id for p in table[place]] == numbers[place]
        for at in range(-num, num):
            assert table[at].prompt_id == numbers[at]
        for at in (num, -num - 1):
            with pytest.raises(IndexError):
                _ = table[at]


def test_prompts_by_name_have_neither_tokens_nor_rows() -> None:
    table = PromptTable.of_numbers([5, 2, 9])
    assert [(p.prompt_id, p.token_ids, p.row) for p in table] == [("5", (), {}), ("2", (), {}), ("9", (), {})]
