"""Groups pass between processes as they are; what only rollouts need if it is asked for."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.method.group_codec import pack, sizes, unpack
from async_rl.method.token_arrays import ExpertIds, Logprobs
from async_rl.method.types import Group, Prompt, Response, RolloutFacts, WeightSpan
from tests.support.groups import make_group, make_response

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
ROUTES = st.lists(st.integers(0, 2**16 - 1), max_size=6).map(ExpertIds)
NUMBERS = st.lists(st.floats(allow_nan=False, width=32), max_size=6).map(Logprobs)
SECONDS = st.floats(0, 1e9)
COUNTS = st.integers(0, 5)
REWARDS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def responses(draw: st.DrawFn) -> Response:
    token_ids = draw(TOKENS)
    bounds = draw(st.sets(st.integers(0, len(token_ids)), max_size=4).map(sorted))
    observed = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    num = len(token_ids) - sum(end - start for start, end in observed)
    logprobs = tuple(draw(st.lists(st.floats(max_value=0, allow_nan=False, width=32), min_size=num, max_size=num)))
    middle = draw(st.integers(0, num))
    spans = (WeightSpan(draw(st.text()), 0, middle), WeightSpan("v1", middle, num))
    return Response(
        token_ids=token_ids,
        logprobs=logprobs,
        text=draw(st.text()),
        finish_reason="stop",
        weight_spans=spans,
        instance=draw(st.text()),
        num_continued=draw(COUNTS),
        num_resampled=draw(COUNTS),
        observed=observed,
        prompt_ids=draw(st.none() | TOKENS),
        routes=draw(st.none() | ROUTES),
        prompt_routes=draw(st.none() | ROUTES),
        token_weights=draw(st.none() | NUMBERS),
        token_rewards=draw(st.none() | NUMBERS),
    )


@st.composite
def facts(draw: st.DrawFn) -> RolloutFacts:
    return RolloutFacts(
        num_responses=draw(st.integers(1, 3)),
        num_turns=draw(COUNTS),
        status=draw(st.sampled_from(["completed", "truncated"])),
        turn_rewards=draw(st.lists(REWARDS, max_size=3).map(tuple)),
        weight=draw(REWARDS),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt = Prompt(
        draw(st.text()),
        draw(TOKENS),
        {"answer": draw(st.text()), "tests": [1, None, 0.5, {"of": True}]},
        stop=draw(st.lists(st.text(), max_size=2).map(tuple)),
        stop_token_ids=draw(TOKENS),
        max_response_tokens=draw(st.none() | COUNTS),
        reward=draw(st.lists(st.text(), max_size=2).map(tuple)),
    )
    rollouts = tuple(draw(st.lists(facts(), max_size=3)))
    parts, metrics = (
        tuple((label, tuple(draw(REWARDS) for _ in rollouts)) for label in draw(st.sets(st.text(), max_size=2)))
        for _ in range(2)
    )
    sampled = tuple(draw(responses()) for _ in range(sum(own.num_responses for own in rollouts)))
    return Group(
        iteration=draw(COUNTS),
        index=draw(COUNTS),
        prompt=prompt,
        responses=sampled,
        rewards=tuple(draw(REWARDS) for _ in rollouts),
        rollouts=rollouts,
        reward_parts=parts,
        reward_metrics=metrics,
        weight_version=draw(st.text()),
        started_s=draw(SECONDS),
        finished_s=draw(SECONDS),
        attempts=draw(COUNTS),
    )


def without_what_only_rollouts_need(group: Group) -> Group:
    return replace(
        group,
        prompt=Prompt(group.prompt.prompt_id, group.prompt.token_ids, {}),
        responses=tuple(replace(response, text="") for response in group.responses),
    )


@pytest.mark.parametrize("codec", [json, msgspec.msgpack], ids=["json", "msgpack"])
@settings(max_examples=30)
@given(sent=st.lists(groups(), max_size=4), with_texts=st.booleans())
def test_groups_arrive_as_they_were_sent(codec: Any, sent: list[Group], with_texts: bool) -> None:
    headers, tokens, logprobs, routes = pack(sent, with_texts=with_texts)
    dumps, loads = (codec.dumps, codec.loads) if codec is json else (codec.encode, codec.decode)
    headers = loads(dumps(headers))
    assert sizes(headers) == (len(tokens), len(logprobs), len(routes))
    received = unpack(headers, tokens.tobytes(), bytearray(logprobs.tobytes()), routes)
    assert received == (sent if with_texts else [without_what_only_rollouts_need(group) for group in sent])


def test_arrays_have_four_bytes_for_a_token_and_for_a_log_prob() -> None:
    group = make_group(0, [make_response((3,), logprobs=(-0.5,))], prompt=(1, 2))
    _, tokens, logprobs, _ = pack([group])
    assert tokens.tolist() == [1, 2, 3] and tokens.dtype == np.int32
    assert logprobs.tolist() == [-0.5] and logprobs.dtype == np.float32


def test_a_row_travels_as_json_has_it() -> None:
    prompt = Prompt("p", (1,), {"score": float("nan"), 3: b"bytes", "kind": {1, 2}.__class__})  # type: ignore[dict-item]
    headers, *arrays = pack([make_group(0, prompt=prompt)], with_texts=True)
    (received,) = unpack(json.loads(json.dumps(headers)), *arrays)
    assert received.prompt.row == {"score": None, "3": "Ynl0ZXM=", "kind": "<class 'set'>"}


def hostile_headers() -> dict[str, Any]:
    """What a peer may send in place of a good header, by what is wrong with it."""
    (good,), *_ = pack([make_group(0, [make_response((3, 4))], prompt=(1, 2))])
    response = good["responses"][0]

    def with_response(**fields: Any) -> dict[str, Any]:
        return {**good, "responses": [{**response, **fields}]}

    return {
        "no header": 7,
        "empty": {},
        "a negative length": with_response(num_tokens=-1),
        "lengths that only add up": {**with_response(num_tokens=5), "num_prompt": -1},
        "a longer response": with_response(num_tokens=3),
        "more log-probs": with_response(num_logprobs=2**62),
        "routes that did not come": with_response(num_routes=1),
        "a length that is no number": with_response(num_tokens="2"),
        "text for a reward": {**good, "rewards": ["1"]},
        "fewer rewards": {**good, "rewards": []},
        "a rollout without responses": {**good, "rollouts": [{"num_responses": 0}]},
        "a rollout too many": {**good, "rollouts": good["rollouts"] * 2, "rewards": good["rewards"] * 2},
        "an unknown status": {**good, "rollouts": [{"status": "lost"}]},
    }


@pytest.mark.parametrize("name", hostile_headers())
def test_a_header_that_does_not_fit_is_refused(name: str) -> None:
    _, tokens, logprobs, _ = pack([make_group(0, [make_response((3, 4))], prompt=(1, 2))])
    with pytest.raises(ValueError):
        unpack([hostile_headers()[name]], tokens, logprobs)


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [(b"", b""), (b"123", b"1234"), (bytes(16), bytes(7)), (bytes(17), bytes(8))]
)
def test_arrays_that_do_not_fit_are_refused(tokens: bytes, logprobs: bytes) -> None:
    headers, *_ = pack([make_group(0, [make_response((3, 4))], prompt=(1, 2))])
    with pytest.raises(ValueError):
        unpack(headers, tokens, logprobs)
