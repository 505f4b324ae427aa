"""Groups pass between ranks as they are, but for what only rollouts need."""

import json
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.types import Group, Prompt, Response, RolloutFacts, WeightSpan
from tests.support.groups import make_group, make_response
from trainer.batching.group_codec import empty_tensors, pack_groups, unpack_groups

TOKENS = st.lists(st.integers(0, 2**40), max_size=6).map(tuple)
SECONDS = st.floats(0, 1e9)
COUNTS = st.integers(0, 5)
REWARDS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def responses(draw: st.DrawFn) -> Response:
    token_ids = draw(TOKENS)
    bounds = draw(st.sets(st.integers(0, len(token_ids)), max_size=4).map(sorted))
    observed = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    num = len(token_ids) - sum(end - start for start, end in observed)
    # JSON keeps no infinity, and the log-probs are not in it: theirs is a tensor.
    logprobs = tuple(draw(st.lists(st.floats(max_value=0, allow_nan=False), min_size=num, max_size=num)))
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
    )


@st.composite
def facts(draw: st.DrawFn) -> RolloutFacts:
    return RolloutFacts(
        num_responses=draw(st.integers(1, 3)),
        num_turns=draw(COUNTS),
        status=draw(st.sampled_from(["completed", "truncated"])),
        turn_rewards=draw(st.lists(REWARDS, max_size=3).map(tuple)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt = Prompt(draw(st.text()), draw(TOKENS), {"answer": draw(st.text())})
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
        prompt=replace(group.prompt, row={}),
        responses=tuple(replace(response, text="") for response in group.responses),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(groups(), max_size=4))
def test_groups_arrive_as_they_were_sent(sent: list[Group]) -> None:
    headers, *tensors = pack_groups(sent)
    headers = json.loads(json.dumps(headers))
    received = empty_tensors(headers)
    for target, source in zip(received, tensors, strict=True):
        assert (target.shape, target.dtype) == (source.shape, source.dtype), "a broadcast needs the same on both sides"
        target.copy_(source)
    assert unpack_groups(headers, *received) == [without_what_only_rollouts_need(group) for group in sent]


def test_tensors_are_integers_and_doubles() -> None:
    group = make_group(0, [make_response((3,), logprobs=(-0.1,))], prompt=(1, 2))
    _, tokens, logprobs = pack_groups([group])
    assert tokens.equal(torch.tensor([1, 2, 3])) and tokens.dtype == torch.int64
    assert logprobs.dtype == torch.float64 and logprobs.tolist() == [-0.1]
