"""A body is taken if every field this engine lacks asks for nothing, and refused by the field's name otherwise."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rl.protocol.inference import SamplingParams
from inference_service.api.requests import (
    NEUTRAL,
    WITHOUT_EFFECT,
    CompletionRequest,
    ServedGenerateRequest,
    ServedSamplingParams,
)

KNOWN = {*CompletionRequest.model_fields, *ServedGenerateRequest.model_fields, *WITHOUT_EFFECT, *NEUTRAL}
UNKNOWN = st.text(min_size=1).filter(lambda name: name not in KNOWN)
NOTHING = st.sampled_from([None, False, 0, 0.0, "", [], {}])
SOMETHING = st.sampled_from([True, 1, 0.5, "x", [0], {"a": None}, -1])
BODIES = st.sampled_from(["sampling", "generate", "completion"])


def parse(kind: str, more: dict[str, Any]) -> Any:
    if kind == "sampling":
        return ServedSamplingParams.model_validate(more)
    if kind == "generate":
        return ServedGenerateRequest.model_validate({"token_ids": [1], "sampling_params": {}} | more)
    return CompletionRequest.model_validate({"prompt": "x"} | more)


@settings(max_examples=60, deadline=None)
@given(BODIES, UNKNOWN, NOTHING)
def test_an_unknown_field_that_asks_for_nothing_is_taken(kind: str, name: str, value: Any) -> None:
    assert parse(kind, {name: value}) == parse(kind, {})


@settings(max_examples=60, deadline=None)
@given(BODIES, UNKNOWN, SOMETHING)
def test_an_unknown_field_that_asks_for_something_is_refused_by_name(kind: str, name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        parse(kind, {name: value})
    assert f"{name!r} = {value!r} is not supported by this engine: leave it out" in str(refused.value)


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_fields_that_change_nothing_are_taken_whatever_they_say(name: str) -> None:
    assert parse("sampling", {name: "anything"}) == parse("sampling", {})


@pytest.mark.parametrize(("name", "value"), NEUTRAL.items())
def test_neutral_values_are_taken_and_others_are_not(name: str, value: Any) -> None:
    assert parse("sampling", {name: value}) == parse("sampling", {})
    with pytest.raises(ValidationError, match=f"'{name}' = 'other' is not supported"):
        parse("sampling", {name: "other"})


def test_sampling_parameters_within_a_request_are_checked_too() -> None:
    with pytest.raises(ValidationError, match=r"'frequency_penalty' = 0\.5 is not supported"):
        parse("generate", {"sampling_params": {"frequency_penalty": 0.5}})


def test_a_long_value_is_cut_in_the_refusal() -> None:
    with pytest.raises(ValidationError) as refused:
        parse("completion", {"suffix": "x" * 10_000})
    assert "'suffix' = 'xxx" in (message := refused.value.errors()[0]["msg"]) and len(message) < 300


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_what_float32_cannot_be_multiplied_with_is_refused(name: str) -> None:
    assert SamplingParams.model_validate({name: 1e30})
    with pytest.raises(ValidationError, match=name):
        parse("sampling", {name: 1e30})


@pytest.mark.parametrize("prompt", ["text", [1, 2], ["text", "more"], [[1], [2, 3]]])
def test_a_completion_takes_texts_and_token_ids_as_they_are(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("prompt", [None, [], [[]], [[1], []], [1, "x"], [-1], 7])
def test_a_completion_of_anything_else_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="prompt"):
        CompletionRequest.model_validate({"prompt": prompt})
