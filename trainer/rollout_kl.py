"""The KL of rollouts to the reference, for algorithms that take it from the reward (`algorithm.kl_in = "reward"`)."""

from collections.abc import Sequence

import torch

from async_rl.algorithms.log_ratio import KLEstimator, kl_terms
from trainer.batching.shared_prompt import MicroBatch
from trainer.devices.host_copies import to_host
from trainer.loss_sums import sampled_logprobs


def rollout_kl(
    scored: Sequence[tuple[MicroBatch, torch.Tensor]], estimator: KLEstimator
) -> dict[int, tuple[float, ...]]:
    """Each group's KL per rollout, summed over its sampled tokens, by the group's index; waits once for the device.

    The policy's side are the log-probs that the instances reported: those of the weights that sampled.

    Args:
        scored: micro-batches of whole groups, with the reference's log-probs of their N sampled tokens.
    """
    terms = [kl_terms(sampled_logprobs(batch, ref_N), ref_N, estimator) for batch, ref_N in scored]
    found: dict[int, list[float]] = {}
    for (batch, _), terms_N in zip(scored, to_host(terms), strict=True):
        responses = [
            (part.group, rollout, i)
            for part in batch.slices
            for rollout, i in zip(part.rollouts, part.indices, strict=True)
        ]
        sizes = [group.responses[i].num_sampled for group, _, i in responses]
        for (group, rollout, _), own_N in zip(responses, terms_N.split(sizes), strict=True):
            sums = found.setdefault(group.index, [0.0] * len(group.rollouts))
            sums[rollout] += float(own_N.double().sum())
    return {index: tuple(sums) for index, sums in found.items()}
