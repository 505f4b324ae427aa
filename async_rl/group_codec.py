"""Finished groups as headers of plain data and two flat arrays, and back: the form in which processes exchange them.

There is no pickle and no object per token. The headers may travel as JSON or MessagePack, the arrays as their bytes.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.json_values import as_json
from async_rl.types import Group, Prompt, Response, RewardParts, RolloutFacts, WeightSpan, WeightVersion

Header = dict[str, Any]
"""One group without its tokens: strings, numbers, lists and dicts only."""

TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")
"""Engines compute log-probs in float32, and JSON keeps the bits of one: nothing is lost."""

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]

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


def pack(
    groups: Sequence[Group], *, with_texts: bool = False
) -> tuple[list[Header], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """(header of each group, token ids int32 [T], rollout log-probs float32 [N]).

    A group's prompt precedes its responses, and a response's own prompt its tokens. `with_texts`: the texts of the
    responses, and all of the prompt with its row as JSON has it, which training needs none of.
    """
    tokens: list[npt.NDArray[np.int32]] = []
    logprobs: list[npt.NDArray[np.float32]] = []
    for group in groups:
        tokens.append(np.array(group.prompt.token_ids, TOKEN))
        for response in group.responses:
            if response.prompt_ids is not None:
                tokens.append(np.array(response.prompt_ids, TOKEN))
            tokens.append(np.array(response.token_ids, TOKEN))
            logprobs.append(np.array(response.logprobs, LOGPROB))
    headers = [msgspec.to_builtins(_header(group, with_texts)) for group in groups]
    return headers, _joined(tokens, TOKEN), _joined(logprobs, LOGPROB)


def sizes(headers: Sequence[Header]) -> tuple[int, int]:
    """How many tokens and log-probs `unpack` expects with these headers.

    Raises:
        ValueError: these are no headers.
    """
    return _sizes(_parsed(headers))


def unpack(headers: Sequence[Header], tokens: Buffer, logprobs: Buffer) -> list[Group]:
    """The groups that `pack` packed; texts and rows are empty unless they were packed, too.

    Args:
        tokens: int32, and `logprobs` float32, of any object with a buffer: an array, bytes that were received.

    Raises:
        ValueError: headers and arrays are none of `pack`, or do not belong together.
    """
    parsed = _parsed(headers)
    token_T, logprob_N = np.frombuffer(tokens, TOKEN), np.frombuffer(logprobs, LOGPROB)
    if _sizes(parsed) != (len(token_T), len(logprob_N)):
        raise ValueError(
            "headers of {} tokens and {} log-probs came with {} and {}".format(
                *_sizes(parsed), len(token_T), len(logprob_N)
            )
        )
    token, logprob = _Taker(token_T), _Taker(logprob_N)
    try:
        return [_group(header, token, logprob) for header in parsed]
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
    )


def _parsed(headers: Sequence[Header]) -> list[_GroupHeader]:
    return msgspec.convert(headers, list[_GroupHeader])


def _sizes(headers: Sequence[_GroupHeader]) -> tuple[int, int]:
    responses = [response for header in headers for response in header.responses]
    num_tokens = sum(header.num_prompt for header in headers)
    num_tokens += sum((response.num_own_prompt or 0) + response.num_tokens for response in responses)
    return num_tokens, sum(response.num_logprobs for response in responses)


class _Taker:
    """Takes one slice of an array after the other."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values = values
        self._begin = 0

    def take(self, count: int) -> tuple[Any, ...]:
        begin, self._begin = self._begin, self._begin + count
        return tuple(self._values[begin : self._begin].tolist())


def _group(header: _GroupHeader, token: _Taker, logprob: _Taker) -> Group:
    prompt_ids, more = token.take(header.num_prompt), header.prompt
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
        responses=tuple(_response(each, token, logprob) for each in header.responses),
        rewards=header.rewards,
        weight_version=header.weight_version,
        started_s=header.started_s,
        finished_s=header.finished_s,
        attempts=header.attempts,
        rollouts=header.rollouts,
        reward_parts=header.reward_parts,
        reward_metrics=header.reward_metrics,
    )


def _response(header: _ResponseHeader, token: _Taker, logprob: _Taker) -> Response:
    return Response(
        prompt_ids=None if header.num_own_prompt is None else token.take(header.num_own_prompt),
        token_ids=token.take(header.num_tokens),
        logprobs=logprob.take(header.num_logprobs),
        text=header.text or "",
        finish_reason=header.finish_reason,
        weight_spans=header.weight_spans,
        instance=header.instance,
        num_continued=header.num_continued,
        num_resampled=header.num_resampled,
        observed=header.observed,
        turn_instances=header.turn_instances,
    )


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
