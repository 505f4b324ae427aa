"""A body is taken if every field this engine lacks asks for nothing, and refused by the field's name otherwise."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rl.shared.protocol.body import Body
from async_rl.shared.protocol.fleet import AddRequest, NameRequest, RegisterRequest
from async_rl.shared.protocol.inference import (
    AbortRequest,
    FinishUpdateRequest,
    InitInfo,
    RpcRequest,
    SamplingParams,
    UpdateInfo,
)
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


@settings(max_examples=60)
@given(BODIES, UNKNOWN, NOTHING)
def test_an_unknown_field_that_asks_for_nothing_is_taken(kind: str, name: str, value: Any) -> None:
    assert parse(kind, {name: value}) == parse(kind, {})


@settings(max_examples=60)
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


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ServedGenerateRequest, {"token_ids": [1], "sampling_params": {}, "request_id": "a\ud800"}),
        (CompletionRequest, {"prompt": [1], "request_id": "a\ud800"}),
        (CompletionRequest, {"prompt": "a\ud800"}),
        (CompletionRequest, {"prompt": ["a", "a\ud800"]}),
        (ServedSamplingParams, {"stop": ["a\ud800"]}),
        (FinishUpdateRequest, {"weight_version": "a\ud800"}),
    ],
    ids=str,
)
def test_a_text_that_no_response_could_repeat_is_refused(kind: type[Body], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"surrogates not allowed|unable to parse"):
        kind.model_validate(body)
    assert kind.model_validate(json.loads(json.dumps(body).replace("\\ud800", "\u00e9")))


LISTS: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "token_ids": (ServedGenerateRequest, {"sampling_params": {}}),
    "stop_token_ids": (ServedSamplingParams, {}),
    "stop": (ServedSamplingParams, {}),
    "prompt": (CompletionRequest, {}),
    "names": (UpdateInfo, {"dtype_names": [], "shapes": []}),
    "dtype_names": (UpdateInfo, {"names": ["a"], "shapes": []}),
    "shapes": (UpdateInfo, {"names": ["a"], "dtype_names": []}),
    "request_ids": (AbortRequest, {}),
    "args": (RpcRequest, {"method": "m"}),
}


@pytest.mark.parametrize("bad", [0.5, {}, [None] * 3], ids=str)
@pytest.mark.parametrize("field", LISTS)
def test_a_list_of_nothing_but_errors_is_described_by_a_few(field: str, bad: Any) -> None:
    kind, others = LISTS[field]
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({**others, field: [bad] * 1000})
    assert refused.value.error_count() <= 8


@pytest.mark.parametrize("kind", [InitInfo, UpdateInfo, RegisterRequest, AddRequest, NameRequest])
def test_a_body_of_nothing_but_unknown_fields_is_described_by_a_few(kind: type[Body]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({f"field_{i}": 0 for i in range(1000)})
    assert refused.value.error_count() == 1
    with pytest.raises(ValidationError, match="flush"):
        kind.model_validate({"flush": True})
