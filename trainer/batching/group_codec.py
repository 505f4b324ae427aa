"""Groups as a JSON header and two packed tensors, the form in which ranks exchange them; no pickle.

Fields that only rollouts need are left out: texts, and the prompt's row of the dataset.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from async_rl.types import Group, Prompt, Response, RewardParts, RolloutFacts, Status, WeightSpan


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]:
    """(header per group, token ids int64, rollout log-probs float64).

    A group's prompt precedes its responses, and a prompt of a response's own precedes its tokens.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    for group in groups:
        tokens += group.prompt.token_ids
        for response in group.responses:
            tokens += response.prompt_ids or ()
            tokens += response.token_ids
            logprobs += response.logprobs
    headers = [_header(group) for group in groups]
    return headers, torch.tensor(tokens, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float64)


def empty_tensors(headers: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty tensors of the sizes that `headers` describe, to receive into."""
    responses = [response for header in headers for response in header["responses"]]
    num_tokens = sum(header["prompt_len"] for header in headers)
    num_tokens += sum((response["prompt_len"] or 0) + response["len"] for response in responses)
    num_logprobs = sum(response["num_logprobs"] for response in responses)
    return torch.empty(num_tokens, dtype=torch.int64), torch.empty(num_logprobs, dtype=torch.float64)


def unpack_groups(headers: Sequence[dict[str, Any]], tokens: torch.Tensor, logprobs: torch.Tensor) -> list[Group]:
    """The groups that `pack_groups` packed."""
    token, logprob = iter(tokens.tolist()), iter(logprobs.tolist())
    return [_group(header, token, logprob) for header in headers]


def _header(group: Group) -> dict[str, Any]:
    return {
        "iteration": group.iteration,
        "index": group.index,
        "prompt_id": group.prompt.prompt_id,
        "prompt_len": len(group.prompt.token_ids),
        "rewards": group.rewards,
        "reward_parts": group.reward_parts,
        "reward_metrics": group.reward_metrics,
        "weight_version": group.weight_version,
        "times": (group.started_s, group.finished_s),
        "attempts": group.attempts,
        "rollouts": [(f.num_responses, f.num_turns, f.status, f.turn_rewards) for f in group.rollouts],
        "responses": [
            {
                "prompt_len": None if response.prompt_ids is None else len(response.prompt_ids),
                "len": len(response.token_ids),
                "num_logprobs": len(response.logprobs),
                "observed": response.observed,
                "finish_reason": response.finish_reason,
                "spans": [(span.version, span.start, span.end) for span in response.weight_spans],
                "instance": response.instance,
                "turn_instances": response.turn_instances,
                "num_continued": response.num_continued,
                "num_resampled": response.num_resampled,
            }
            for response in group.responses
        ],
    }


def _group(header: dict[str, Any], token: Iterator[int], logprob: Iterator[float]) -> Group:
    prompt = Prompt(header["prompt_id"], _next(token, header["prompt_len"]), {})
    responses = tuple(
        Response(
            prompt_ids=None if response["prompt_len"] is None else _next(token, response["prompt_len"]),
            token_ids=_next(token, response["len"]),
            logprobs=_next(logprob, response["num_logprobs"]),
            observed=tuple((start, end) for start, end in response["observed"]),
            text="",
            finish_reason=response["finish_reason"],
            weight_spans=tuple(WeightSpan(*span) for span in response["spans"]),
            instance=response["instance"],
            turn_instances=tuple((instance, num_tokens) for instance, num_tokens in response["turn_instances"]),
            num_continued=response["num_continued"],
            num_resampled=response["num_resampled"],
        )
        for response in header["responses"]
    )
    started_s, finished_s = header["times"]
    return Group(
        iteration=header["iteration"],
        index=header["index"],
        prompt=prompt,
        responses=responses,
        rewards=tuple(header["rewards"]),
        reward_parts=_parts(header["reward_parts"]),
        reward_metrics=_parts(header["reward_metrics"]),
        weight_version=header["weight_version"],
        started_s=started_s,
        finished_s=finished_s,
        attempts=header["attempts"],
        rollouts=tuple(_facts(*fields) for fields in header["rollouts"]),
    )


def _parts(values: Sequence[tuple[str, Sequence[float]]]) -> RewardParts:
    return tuple((label, tuple(each)) for label, each in values)


def _facts(num_responses: int, num_turns: int, status: Status, turn_rewards: Sequence[float]) -> RolloutFacts:
    return RolloutFacts(
        num_responses=num_responses, num_turns=num_turns, status=status, turn_rewards=tuple(turn_rewards)
    )


def _next(values: Iterator[Any], count: int) -> tuple[Any, ...]:
    return tuple(islice(values, count))
