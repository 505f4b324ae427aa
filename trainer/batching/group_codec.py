"""Groups as a JSON header and two packed tensors, the form in which ranks exchange them; no pickle.

Fields that only rollouts need are left out: texts, and the prompt's row of the dataset.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from async_rl.types import Group, Prompt, Response, WeightSpan


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]:
    """(header per group, token ids int64, rollout log-probs float64); each prompt's tokens precede its responses'."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for group in groups:
        tokens += group.prompt.token_ids
        for response in group.responses:
            tokens += response.token_ids
            logprobs += response.logprobs
    headers = [_header(group) for group in groups]
    return headers, torch.tensor(tokens, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float64)


def empty_tensors(headers: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty tensors of the sizes that `headers` describe, to receive into."""
    num_logprobs = sum(response["len"] for header in headers for response in header["responses"])
    num_tokens = num_logprobs + sum(header["prompt_len"] for header in headers)
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
        "weight_version": group.weight_version,
        "times": (group.started_s, group.finished_s),
        "attempts": group.attempts,
        "responses": [
            {
                "len": len(response.token_ids),
                "finish_reason": response.finish_reason,
                "spans": [(span.version, span.start, span.end) for span in response.weight_spans],
                "instance": response.instance,
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
            token_ids=_next(token, response["len"]),
            logprobs=_next(logprob, response["len"]),
            text="",
            finish_reason=response["finish_reason"],
            weight_spans=tuple(WeightSpan(*span) for span in response["spans"]),
            instance=response["instance"],
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
        weight_version=header["weight_version"],
        started_s=started_s,
        finished_s=finished_s,
        attempts=header["attempts"],
    )


def _next(values: Iterator[Any], count: int) -> tuple[Any, ...]:
    return tuple(next(values) for _ in range(count))
