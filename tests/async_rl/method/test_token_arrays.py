"""Arrays of tokens and log-probs: like tuples, but of four bytes a value and without an object for each."""

import copy
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Prompt, Response
from tests.support.groups import make_response

LISTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(LISTS, st.lists(st.floats(width=32, allow_nan=False), max_size=20), st.slices(20))
def test_they_behave_as_the_tuple_of_their_values(ids: list[int], values: list[float], piece: slice) -> None:
    for made, expected in ((TokenIds(ids), tuple(ids)), (Logprobs(values), tuple(values))):
        assert made == expected == made and made == list(expected)
        assert hash(made) == hash(expected) and {made: 1}[expected] == 1
        assert (len(made), tuple(made), made.tolist(), bool(made)) == (
            len(expected),
            expected,
            list(expected),
            bool(expected),
        )
        assert made[piece] == expected[piece] and type(made[piece]) is type(made)
        assert made + made == expected * 2 and expected + made == expected * 2 and made + expected == expected * 2
        assert type(made).joined([made, made[piece]]) == expected + expected[piece]
        assert type(made).of_bytes(made.buffer) == made and np.frombuffer(made.buffer, made.buffer.format).tolist() == [
            *expected
        ]
        for same in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), type(made)(made)):
            assert same == made and type(same) is type(made)


@given(LISTS, LISTS)
def test_they_are_ordered_as_tuples(a: list[int], b: list[int]) -> None:
    assert (TokenIds(a) < TokenIds(b)) == (a < b) and (TokenIds(a) == TokenIds(b)) == (a == b)


def test_they_cannot_be_changed() -> None:
    made = TokenIds([1, 2])
    with pytest.raises(TypeError):
        made[0] = 3  # type: ignore[index]
    with pytest.raises(TypeError):
        made.buffer[0] = 3
    source = TokenIds(made)
    assert source == made == (1, 2)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_outside_int32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds([1, token])


def test_a_value_takes_four_bytes() -> None:
    response = make_response(range(10_000))
    arrays = response.token_ids._array, response.logprobs._array
    assert sum(map(sys.getsizeof, arrays)) <= 8.1 * 10_000
    assert len(pickle.dumps(response)) <= 8.1 * 10_000


def test_a_log_prob_of_float32_keeps_its_bits_through_json() -> None:
    values = np.random.default_rng(0).standard_exponential(1000, np.float32) * np.float32(-1)
    assert np.array(Logprobs(map(float, map(repr, values.tolist())))).astype(np.float32).tobytes() == values.tobytes()


def test_prompts_and_responses_make_arrays_of_other_sequences() -> None:
    assert type(Prompt("p", (1, 2), {}).token_ids) is TokenIds  # type: ignore[arg-type]
    response = Response(
        token_ids=[1, 2],  # type: ignore[arg-type]
        logprobs=(-1.0, -2.0),  # type: ignore[arg-type]
        text="",
        finish_reason="stop",
        weight_spans=(),
        instance="",
        prompt_ids=(3,),  # type: ignore[arg-type]
    )
    assert (type(response.token_ids), type(response.logprobs), type(response.prompt_ids)) == (
        *(TokenIds, Logprobs),
        TokenIds,
    )


def test_a_long_one_is_shown_by_its_beginning() -> None:
    assert repr(TokenIds([1, 2])) == "TokenIds((1, 2))" and len(repr(TokenIds(range(10_000)))) < 200
