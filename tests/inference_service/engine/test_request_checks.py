"""What a request may ask of a model: exactly what can be generated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.shared.protocol.inference import SamplingParams
from inference_service.engine_interface import Limits, RequestRefused, check_request

TOKENS = st.integers(-2, 7)


@settings(max_examples=150)
@given(
    prompt=st.lists(TOKENS, max_size=6),
    limits=st.builds(Limits, max_model_len=st.integers(1, 8), vocab_size=st.integers(2, 6)),
    max_tokens=st.integers(1, 6),
    min_tokens=st.integers(0, 7),
    stops=st.lists(TOKENS, max_size=7),
)
def test_exactly_what_can_be_generated_passes(
    prompt: list[int], limits: Limits, max_tokens: int, min_tokens: int, stops: list[int]
) -> None:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops)
    vocabulary = set(range(limits.vocab_size))
    # EOS is one of the tokens that may not come before min_tokens, and need not be among the stops.
    faults = {
        "token_ids": not prompt or not set(prompt) <= vocabulary,
        "max_tokens": len(prompt) + max_tokens > limits.max_model_len,
        "min_tokens": min_tokens > max_tokens,
        "stop_token_ids": not set(stops) <= vocabulary or (min_tokens > 0 and len(vocabulary - set(stops)) <= 1),
    }
    try:
        check_request(prompt, params, limits)
    except RequestRefused as error:
        assert error.param is not None and faults[error.param], str(error)
    else:
        assert not any(faults.values())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty: expected at least one token id"),
        ([1, 9], {}, "token id 9 is out of vocabulary: expected 0 to 8"),
        ([1] * 20, {"max_tokens": 1}, "has 20 tokens and max_tokens is 1, .* maximum of 20: shorten the prompt or"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3, more than max_tokens 2"),
        ([1, 2], {"num_continued": 2}, "num_continued is 2, but the prompt, .*, has 2: expected fewer"),
        ([1], {"stop_token_ids": [-1]}, "stop_token_ids has -1: expected 0 to 8"),
        (
            [1],
            {"min_tokens": 1, "stop_token_ids": list(range(8))},
            "leaves no token .* before min_tokens 1: give fewer",
        ),
    ],
)
def test_a_refusal_says_what_was_found_and_what_was_expected(
    prompt: list[int], params: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        check_request(prompt, SamplingParams.model_validate(params), Limits(max_model_len=20, vocab_size=9))
