"""Where responses end: by the run, by the part, by the row; and nothing beyond it is kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.rollout_section import RolloutSection
from async_rl.method.token_arrays import ExpertIds
from async_rl.method.types import Prompt, Response, WeightSpan
from async_rl.rollouts.groups.sampling import Truncation, single_turn_sampling, until_stop, with_text
from async_rl.rollouts.instance.dialect import completion_request, generate_request
from tests.support.groups import make_response

ROLLOUT = RolloutSection(max_response_tokens=50, stop=(3, "END"))


def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(chr(97 + token) for token in tokens) for tokens in sequences]


def response(*tokens: int) -> Response:
    """Of two spans, with log-probs that tell the place of each token."""
    spans = (WeightSpan("v", 0, 2), WeightSpan("v", 2, len(tokens)))
    return make_response(
        tokens, logprobs=[-float(i) for i in range(len(tokens))], finish_reason="length", weight_spans=spans
    )


@pytest.mark.parametrize(("limit", "expected"), [(None, 50), (9, 9), (70, 50)])
def test_a_row_adds_to_what_ends_a_response_and_lowers_its_limit(limit: int | None, expected: int) -> None:
    prompt = Prompt("0", (1,), {}, ("END", "x"), (4, 3), limit)
    sampling = single_turn_sampling(ROLLOUT, prompt, num_responses=2, temperature=0.7, seed=5)
    assert (sampling.stop, sampling.stop_token_ids, sampling.max_tokens) == (["END", "x"], [3, 4], expected)
    assert (sampling.n, sampling.temperature, sampling.seed, sampling.logprobs) == (2, 0.7, 5, 0)
    assert generate_request([1], sampling, "a").sampling_params.stop == ["END", "x"]
    assert completion_request([1], sampling, "a").stop == ["END", "x"]


def test_truncation_reaches_both_forms_of_a_request_and_is_off_for_rollouts() -> None:
    def asked(**truncation: Any) -> list[dict[str, Any]]:
        prompt = Prompt("0", (1,), {})
        sampling = single_turn_sampling(ROLLOUT, prompt, num_responses=2, temperature=0.7, seed=5, **truncation)
        generate = generate_request([1], sampling, "a").sampling_params.model_dump()
        return [generate, completion_request([1], sampling, "a").model_dump()]

    assert [(each["top_p"], each["top_k"]) for each in asked()] == [(1.0, 0)] * 2
    cut = asked(truncation=Truncation(top_p=0.95, top_k=20))
    assert [(each["top_p"], each["top_k"]) for each in cut] == [(0.95, 20)] * 2


def test_a_response_ends_with_the_token_that_completes_the_text() -> None:
    (cut,) = with_text([response(0, 1, 2, 3, 4)], ["zz", "cd"], decode)
    assert (cut.token_ids, cut.logprobs, cut.text) == ((0, 1, 2, 3), (0.0, -1.0, -2.0, -3.0), "abcd")
    assert cut.finish_reason == "stop" and cut.weight_versions == {"v"}
    routed = replace(response(0, 1, 2, 3), routes=ExpertIds([4, 4, 5, 5, 6, 6]))
    assert until_stop(routed, ["bc"], decode).routes == ExpertIds([4, 4, 5, 5])
    single = replace(response(0), routes=ExpertIds())
    assert until_stop(single, ["a"], decode).routes == ExpertIds()
    whole = response(0, 1, 2)
    assert until_stop(whole, ["ba"], decode) is whole and until_stop(whole, [], decode) is whole


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.text("abc", min_size=1, max_size=3))
def test_no_shorter_beginning_has_the_text(tokens: list[int], stop: str) -> None:
    cut = until_stop(response(*tokens), [stop], decode)
    (text,) = decode([cut.token_ids])
    assert stop not in text[:-1] and tuple(tokens[: len(text)]) == cut.token_ids
    assert (stop in text) == (stop in decode([tokens])[0]) and (stop in text or len(text) == len(tokens))
