"""The trainer's log-probs of recorded groups, as `diagnosis.py` asks for them; for `__main__.py`.

All ranks score the same groups, those of every replica, and all get the result.
"""

from collections.abc import Sequence

import torch

from async_rl.config.sections import Config
from async_rl.method.group_codec import unpack
from async_rl.method.proof.gap_limits import noise_limits
from async_rl.method.proof.logprob_gaps import MIXED
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group
from trainer.batching.group_codec import joined_tensor, pack_groups
from trainer.forward_backward import make_passes
from trainer.model.adapters import adapters_of, base_parameters
from trainer.model.gpt import RankModel, build_model
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer
from trainer.verify.diagnosis import Diagnosis, diagnose

MAX_TOKENS = 2048
"""Sampled tokens of an instance that one replica offers: eight times as many as a judgement needs."""


class Scorer:
    """Scores groups by the policy of a trainer, or by what is made of it; to be created before the first step."""

    def __init__(self, config: Config, parallel: Parallel, megatron: MegatronTrainer) -> None:
        self._config = config
        self._parallel = parallel
        self._megatron = megatron
        model = megatron.models.policy_model
        self._first_head = _head_of(model).detach().clone() if parallel.is_last_stage else None

    def diagnose(self, groups: Sequence[Group]) -> dict[str, Diagnosis]:
        """Instance -> what its log-probs say, from some of the finished `groups` of each replica."""
        section = self._config
        limits = noise_limits(section.train, section.model.dtype)
        found = {}
        for url, chosen in self._chosen(groups).items():
            reported = (response.logprobs for group in chosen for response in group.responses)
            reported_N = joined_tensor(reported, torch.float64)
            of_instance = _OfInstance(self, chosen)
            found[url] = diagnose(reported_N, of_instance, limits, section.rollout.temperature, section.model.dtype)
        return found

    def score(self, groups: Sequence[Group], temperature: float, model: RankModel) -> torch.Tensor:
        """Log-probs of the sampled tokens in the order of groups and responses, float64 [N]."""
        passes = make_passes(
            [[group] for group in groups], self._parallel, temperature, self._config.trainer.micro_batch_tokens
        )
        parts: dict[tuple[int, int], list[float]] = {}
        numbers = {id(group): number for number, group in enumerate(groups)}
        for a_pass in passes:
            # Before the last stage of a pipeline there are none.
            for batch, logprobs_N in zip(a_pass.micro_batches, a_pass.logprobs(model), strict=False):
                responses = [(numbers[id(part.group)], i) for part in batch.slices for i in part.indices]
                sizes = [groups[number].responses[i].num_sampled for number, i in responses]
                for response, own_N in zip(responses, logprobs_N.split(sizes), strict=True):
                    parts[response] = own_N.tolist()
        ordered = [logprob for response in sorted(parts) for logprob in parts[response]]
        # Every replica has scored them; the first result is used.
        answers = self._parallel.gather_json(ordered if self._parallel.reports else [])
        return torch.tensor(next(answer for answer in answers if answer), dtype=torch.float64)

    def by_policy(self, groups: Sequence[Group], temperature: float) -> torch.Tensor:
        with self._megatron.models.policy_to_score() as policy:
            return self.score(groups, temperature, policy)

    def with_first_head(self, groups: Sequence[Group]) -> torch.Tensor | None:
        """None where the head has not changed yet."""
        model, head = self._megatron.models.policy_model, self._first_head
        changed = head is not None and not torch.equal(head, _head_of(model))
        if not any(self._parallel.gather_json(changed)):
            return None
        model.chunks[-1].other_head = head
        try:
            return self.by_policy(groups, self._config.rollout.temperature)
        finally:
            model.chunks[-1].other_head = None

    def in_other_dtype(self, groups: Sequence[Group]) -> torch.Tensor:
        """By a copy of the policy, which takes the memory of its weights."""
        policy = self._megatron.models.policy_model
        other = torch.float32 if self._config.model.dtype == "bfloat16" else torch.bfloat16
        copy = build_model(policy.shape, other, self._parallel, self._config.trainer)
        for own_chunk, chunk in zip(copy.chunks, policy.chunks, strict=True):
            own_chunk.replays = chunk.replays
        with torch.no_grad():
            sources, adapters = base_parameters(policy) | dict(policy.named_buffers()), adapters_of(policy)
            for name, own in (*copy.named_parameters(), *copy.named_buffers()):
                adapter = adapters.get(name)
                own.copy_(sources[name] if adapter is None else adapter.merged(sources[name]))
            copy.requires_grad_(False).eval()
            return self.score(groups, self._config.rollout.temperature, copy)

    def _chosen(self, groups: Sequence[Group]) -> dict[str, list[Group]]:
        """For each instance some groups that it sampled alone, of all replicas."""
        headers, tensors = pack_groups(some_of_each(groups))
        gathered = self._parallel.gather_json([headers, *(tensor.tolist() for tensor in tensors)])
        by_instance: dict[str, list[Group]] = {}
        for its_headers, its_tokens, its_logprobs, its_routes in gathered:
            values = TokenIds(its_tokens).buffer, Logprobs(its_logprobs).buffer, bytes(its_routes)
            for group in unpack(its_headers, *values):
                url = _sampler(group)
                assert url is not None, "only groups of one instance are chosen"
                by_instance.setdefault(url, []).append(group)
        return {url: sorted(by_instance[url], key=lambda group: group.index) for url in sorted(by_instance)}


class _OfInstance:
    """The hypotheses about the groups of one instance."""

    def __init__(self, scorer: Scorer, groups: Sequence[Group]) -> None:
        self._scorer = scorer
        self._groups = groups

    def logprobs_at(self, temperature: float) -> torch.Tensor:
        return self._scorer.by_policy(self._groups, temperature)

    def with_first_head(self) -> torch.Tensor | None:
        return self._scorer.with_first_head(self._groups)

    def in_other_dtype(self) -> torch.Tensor:
        return self._scorer.in_other_dtype(self._groups)


def some_of_each(groups: Sequence[Group]) -> list[Group]:
    """Of each instance, the groups that it sampled alone, up to `MAX_TOKENS`.

    In the order of the batch: the groups that finish first are those with short responses, and early ends of sequence
    look like another temperature.
    """
    tokens: dict[str, int] = {}
    chosen = []
    for group in sorted(groups, key=lambda group: group.index):
        url = _sampler(group)
        if url is not None and tokens.get(url, 0) < MAX_TOKENS:
            tokens[url] = tokens.get(url, 0) + group.num_response_tokens
            chosen.append(group)
    return chosen


def _sampler(group: Group) -> str | None:
    """The instance that sampled all tokens of a group; None for several, or for a request that was continued."""
    instances = {instance for response in group.responses for instance, _ in response.sampled_by}
    return instances.pop() if len(instances) == 1 and MIXED not in instances else None


def _head_of(model: RankModel) -> torch.Tensor:
    last = model.chunks[-1]
    weight: torch.Tensor = last.shared_embedding_or_output_weight() if model.shape.tied else last.output_layer.weight
    return weight
