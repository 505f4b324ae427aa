"""Finished groups as headers of plain data and three flat arrays, and back: the form in which processes exchange them.

There is no pickle and no object per token. The headers may travel as JSON or MessagePack, the arrays as their bytes.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.method.token_arrays import ExpertIds, Logprobs, TokenIds
from async_rl.method.types import (
    Group,
    Prompt,
    Response,
    RewardParts,
    RolloutFacts,
    WeightSpan,
    WeightVersion,
    WholeGroup,
)
from async_rl.shared.json_values import as_json

Header = dict[str, Any]
"""One group without its tokens: strings, numbers, lists and dicts only."""

TOKEN = np.dtype(np.int32)
LOGPROB = np.dtype(np.float32)
EXPERT = np.dtype(np.uint16)
ITEM_BYTES: dict[type[TokenIds] | type[Logprobs] | type[ExpertIds], int] = {TokenIds: 4, Logprobs: 4, ExpertIds: 2}

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]

V = TypeVar("V", TokenIds, Logprobs, ExpertIds)

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _PromptHeader(msgspec.Struct):
    """What only rollouts, rewards and records need of a prompt; `row` is as JSON has it."""

    row: dict[str, Any]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    max_response_tokens: int | None
    reward: tuple[str, ...]


class _ResponseHeader(msgspec.Struct):
    num_own_prompt: _Count | None
    num_tokens: _Count
    num_logprobs: _Count
    finish_reason: str
    weight_spans: tuple[WeightSpan, ...]
    instance: str
    num_continued: int
    num_resampled: int
    observed: tuple[tuple[int, int], ...]
    turn_instances: tuple[tuple[str, int], ...]
    text: str | None
    num_routes: _Count | None = None
    num_prompt_routes: _Count | None = None
    num_weights: _Count | None = None
    num_rewards: _Count | None = None
    """Of tokens, after the log-probs."""


class _GroupHeader(msgspec.Struct):
    iteration: int
    index: int
    prompt_id: str
    num_prompt: _Count
    prompt: _PromptHeader | None
    responses: tuple[_ResponseHeader, ...]
    rewards: tuple[float, ...]
    weight_version: WeightVersion
    started_s: float
    finished_s: float
    attempts: int
    rollouts: tuple[RolloutFacts, ...]
    reward_parts: RewardParts
    reward_metrics: RewardParts
    whole: WholeGroup | None = None


def pack(
    groups: Sequence[Group], *, with_texts: bool = False
) -> tuple[list[Header], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.uint16]]:
    """(header of each group, token ids int32 [T], rollout log-probs float32 [N], routes uint16 [R], if there are any).

    A group's prompt precedes its responses, and a response's own prompt its tokens; what nodes of the pipeline say of a
    response's tokens follows its log-probs. `with_texts`: the texts of the
    responses, and all of the prompt with its row as JSON has it, which training needs none of.
    """
    tokens: list[TokenIds] = []
    logprobs: list[Logprobs] = []
    routes: list[ExpertIds] = []
    for group in groups:
        tokens.append(group.prompt.token_ids)
        for response in group.responses:
            if response.prompt_ids is not None:
                tokens.append(response.prompt_ids)
            tokens.append(response.token_ids)
            logprobs.append(response.logprobs)
            logprobs += [some for some in (response.token_weights, response.token_rewards) if some is not None]
            routes += [some for some in (response.prompt_routes, response.routes) if some is not None]
    headers = [msgspec.to_builtins(_header(group, with_texts)) for group in groups]
    return headers, _joined(tokens, TOKEN), _joined(logprobs, LOGPROB), _joined(routes, EXPERT)


def sizes(headers: Sequence[Header]) -> tuple[int, int, int]:
    """How many tokens, log-probs and routes `unpack` expects with these headers.

    Raises:
        ValueError: these are no headers.
    """
    return _sizes(_parsed(headers))


def unpack(headers: Sequence[Header], tokens: Buffer, logprobs: Buffer, routes: Buffer = b"") -> list[Group]:
    """The groups that `pack` packed; texts and rows are empty unless they were packed, too.

    Args:
        tokens: int32, `logprobs` float32 and `routes` uint16, of any object with a buffer: an array, bytes that were
            received.

    Raises:
        ValueError: headers and arrays are none of `pack`, or do not belong together.
    """
    parsed = _parsed(headers)
    views = [_bytes_of(values) for values in (tokens, logprobs, routes)]
    expected, received = (
        _sizes(parsed),
        [len(view) / size for view, size in zip(views, ITEM_BYTES.values(), strict=True)],
    )
    if list(expected) != received:
        raise ValueError(
            "headers of {} tokens, {} log-probs and {} routes came with {:g}, {:g} and {:g}".format(
                *expected, *received
            )
        )
    take = _Takers(_Taker(views[0], TokenIds), _Taker(views[1], Logprobs), _Taker(views[2], ExpertIds))
    try:
        return [_group(header, take) for header in parsed]
    except AssertionError as error:
        raise ValueError(str(error)) from error


def _header(group: Group, with_texts: bool) -> _GroupHeader:
    prompt = group.prompt
    return _GroupHeader(
        iteration=group.iteration,
        index=group.index,
        prompt_id=prompt.prompt_id,
        num_prompt=len(prompt.token_ids),
        prompt=_PromptHeader(
            row=as_json(prompt.row),
            stop=prompt.stop,
            stop_token_ids=prompt.stop_token_ids,
            max_response_tokens=prompt.max_response_tokens,
            reward=prompt.reward,
        )
        if with_texts
        else None,
        responses=tuple(_response_header(response, with_texts) for response in group.responses),
        rewards=group.rewards,
        weight_version=group.weight_version,
        started_s=group.started_s,
        finished_s=group.finished_s,
        attempts=group.attempts,
        rollouts=group.rollouts,
        reward_parts=group.reward_parts,
        reward_metrics=group.reward_metrics,
        whole=group.whole,
    )


def _response_header(response: Response, with_texts: bool) -> _ResponseHeader:
    return _ResponseHeader(
        num_own_prompt=None if response.prompt_ids is None else len(response.prompt_ids),
        num_tokens=len(response.token_ids),
        num_logprobs=len(response.logprobs),
        finish_reason=response.finish_reason,
        weight_spans=response.weight_spans,
        instance=response.instance,
        num_continued=response.num_continued,
        num_resampled=response.num_resampled,
        observed=response.observed,
        turn_instances=response.turn_instances,
        text=response.text if with_texts else None,
        num_routes=None if response.routes is None else len(response.routes),
        num_prompt_routes=None if response.prompt_routes is None else len(response.prompt_routes),
        num_weights=None if response.token_weights is None else len(response.token_weights),
        num_rewards=None if response.token_rewards is None else len(response.token_rewards),
    )


def _parsed(headers: Sequence[Header]) -> list[_GroupHeader]:
    return msgspec.convert(headers, list[_GroupHeader])


def _sizes(headers: Sequence[_GroupHeader]) -> tuple[int, int, int]:
    responses = [response for header in headers for response in header.responses]
    num_tokens = sum(header.num_prompt for header in headers)
    num_tokens += sum((response.num_own_prompt or 0) + response.num_tokens for response in responses)
    num_routes = sum((response.num_prompt_routes or 0) + (response.num_routes or 0) for response in responses)
    num_logprobs = sum(each.num_logprobs + (each.num_weights or 0) + (each.num_rewards or 0) for each in responses)
    return num_tokens, num_logprobs, num_routes


class _Taker(Generic[V]):
    """Takes one piece of a buffer after the other."""

    def __init__(self, values: memoryview, kind: type[V]) -> None:
        self._values = values
        self._kind: type[V] = kind
        self._begin = 0

    def take(self, count: int) -> V:
        begin, self._begin = self._begin, self._begin + count * ITEM_BYTES[self._kind]
        return self._kind.of_bytes(self._values[begin : self._begin])


class _Takers(NamedTuple):
    """Of the three arrays."""

    token: _Taker[TokenIds]
    logprob: _Taker[Logprobs]
    route: _Taker[ExpertIds]


def _group(header: _GroupHeader, take: _Takers) -> Group:
    prompt_ids, more = take.token.take(header.num_prompt), header.prompt
    prompt = Prompt(header.prompt_id, prompt_ids, {})
    if more is not None:
        prompt = Prompt(
            header.prompt_id,
            prompt_ids,
            more.row,
            stop=more.stop,
            stop_token_ids=more.stop_token_ids,
            max_response_tokens=more.max_response_tokens,
            reward=more.reward,
        )
    return Group(
        iteration=header.iteration,
        index=header.index,
        prompt=prompt,
        responses=tuple(_response(each, take) for each in header.responses),
        rewards=header.rewards,
        weight_version=header.weight_version,
        started_s=header.started_s,
        finished_s=header.finished_s,
        attempts=header.attempts,
        rollouts=header.rollouts,
        reward_parts=header.reward_parts,
        reward_metrics=header.reward_metrics,
        whole=header.whole,
    )


def _response(header: _ResponseHeader, take: _Takers) -> Response:
    return Response(
        prompt_ids=None if header.num_own_prompt is None else take.token.take(header.num_own_prompt),
        token_ids=take.token.take(header.num_tokens),
        logprobs=take.logprob.take(header.num_logprobs),
        prompt_routes=None if header.num_prompt_routes is None else take.route.take(header.num_prompt_routes),
        routes=None if header.num_routes is None else take.route.take(header.num_routes),
        token_weights=None if header.num_weights is None else take.logprob.take(header.num_weights),
        token_rewards=None if header.num_rewards is None else take.logprob.take(header.num_rewards),
        text=header.text or "",
        finish_reason=header.finish_reason,
        weight_spans=header.weight_spans,
        instance=header.instance,
        num_continued=header.num_continued,
        num_resampled=header.num_resampled,
        observed=header.observed,
        turn_instances=header.turn_instances,
    )


def _bytes_of(buffer: Buffer) -> memoryview:
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _joined(
    parts: Sequence[TokenIds] | Sequence[Logprobs] | Sequence[ExpertIds], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    return np.frombuffer(bytearray().join(part.buffer for part in parts), dtype)
