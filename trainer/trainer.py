"""The policy in training on Megatron-core: windows of groups in, optimizer steps out.

Gradients are sums over the groups in the order in which they arrive, divided once by the count of everything
accumulated (invariant I4).
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

from async_rl.checks.preflight.adapter import first_adapters
from async_rl.checks.preflight.adapter_sizes import layer_parameters
from async_rl.checks.preflight.model import find_checkpoint, read_shape
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import Config, ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.loop import Window
from async_rl.method.algorithms import Rollouts, Totals, make_algorithm
from async_rl.method.algorithms.base import added
from async_rl.method.group_proof import GroupProof
from async_rl.method.pieces import counts_group
from async_rl.method.proof.gap_limits import noise_limits
from async_rl.method.step_stats import StepStats, highest
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Group
from async_rl.records.throughput import ModelSize, TrainingPool
from trainer.algorithm_checks import (
    require_denominator,
    require_known_tokens,
    require_nodes,
    require_one_micro_batch,
    require_possible,
)
from trainer.batching.group_feed import GroupFeed
from trainer.critic import Critic
from trainer.device_watch import DeviceWatch
from trainer.devices.memory import memory_peaks
from trainer.devices.peak_flops import peak_flops_of
from trainer.forward_backward import Pass, by_gradient, logprobs_of, make_passes, unscored_group
from trainer.hf.adapter_export import AdapterExport
from trainer.hf.checkpoint import save_hf_checkpoint
from trainer.hf.weight_export import WeightExport
from trainer.loss_sums import LossSums, rollout_kl
from trainer.parallel import Parallel
from trainer.policy.canary_adapters import CanaryAdapters
from trainer.policy.canary_weights import CanaryWeights
from trainer.policy.merge_watch import MergeWatch
from trainer.policy.optimizer import PolicyOptimizer
from trainer.policy.tri_model import Frozen, load_tri_model
from trainer.policy.turns import Turns

log = logging.getLogger(__name__)

NO_ADAPTER = AdapterSection()
"""All weights are trained."""


class MegatronTrainer:
    """One rank of the training pool: every replica accumulates its part of a batch, all of them step together.

    Its methods are collective: all ranks call them in the same order, ranks of one replica with the same windows.
    """

    def __init__(
        self,
        parallel: Parallel,
        section: TrainerSection,
        model: ModelSection,
        rollout: RolloutSection,
        algorithm: AlgorithmSection,
        optimizer: OptimizerSection,
        train: TrainSection,
        adapter: AdapterSection = NO_ADAPTER,
        *,
        takes_turns: bool = False,
        publishes_adapters: bool = False,
    ) -> None:
        """Loads the model named by `model.path`, and the critic where the algorithm needs one.

        With `takes_turns` its memory leaves the device from each publish to the first window. With `publishes_adapters`
        a publish sends the adapters alone, and `export` the base.

        Raises:
            ConfigError: there is no such checkpoint, or the trainer does not support it.
        """
        self._parallel = parallel
        self._section = section
        self._temperature = rollout.temperature
        self._old_policy = algorithm.old_policy
        self.checkpoint = find_checkpoint(model.path)
        self._shape = read_shape(self.checkpoint)
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._algorithm = make_algorithm(algorithm, rollout.max_response_tokens)
        require_possible(self._algorithm.needs, algorithm, train)
        self._config = algorithm
        self.models = load_tri_model(
            self.checkpoint,
            self._shape,
            self._dtype,
            parallel,
            section,
            adapter,
            needs_old=algorithm.old_policy in ("model", "lagged"),
            needs_reference=self._algorithm.needs.reference,
            teacher=algorithm.teacher if self._algorithm.needs.teacher else None,
            replays=train.router_replay,
        )
        num_held = algorithm.critic.critic_iterations_alone if self._algorithm.needs.values else 0
        self.optimizer = PolicyOptimizer(optimizer, train, self.models.policy, parallel.shares_gradients, num_held)
        self.critic: Critic | None = None
        if self._algorithm.needs.values:
            source = (self.checkpoint, self._dtype, parallel, section)
            self.critic = Critic(algorithm, optimizer, train, *source, adapter)
        # The sizes of a teacher and a critic are their own.
        is_alone = self.critic is None and self.models.teacher is None
        of_adapters = self._shape.num_layers * layer_parameters(adapter, self._shape, 1)
        self.training_pool = TrainingPool(
            num_devices=parallel.num_ranks,
            model=ModelSize.of(self._shape, of_adapters) if is_alone else None,
            num_frozen=len(self.models.frozen),
            peak_flops=peak_flops_of(parallel.device.DEVICE, self._dtype),
        )
        policy = self.models.policy_model
        self.export = WeightExport(policy, merges=not publishes_adapters)
        self.adapter_export = AdapterExport(policy, adapter) if publishes_adapters else None
        self.canary_weights = CanaryAdapters(policy, adapter) if publishes_adapters else CanaryWeights(policy)
        self._merges = None if publishes_adapters else MergeWatch(policy)
        self.turns = Turns(self._trained, self._frozen, parallel.device.DEVICE, takes_turns=takes_turns)
        self.device_watch = DeviceWatch(parallel.device.DEVICE, parallel.num_ranks, section.lost_after_s)
        self._feed = GroupFeed(parallel, section)
        self._totals: Totals | None = None
        self._samples = True
        """Whether the policy is the one that rollouts are sampled from: not after the first of several steps."""
        self._sums = LossSums(self._algorithm, algorithm.old_policy, noise_limits(train, model.dtype).clip)

    @classmethod
    def of(cls, config: Config, parallel: Parallel) -> "MegatronTrainer":
        """The trainer of a run; raises what the constructor does."""
        # On a CPU both pools have the host's memory anyway.
        takes_turns = config.run.placement == "turns" and config.trainer.device != "cpu"
        adapter = config.adapter.model_copy(update={"path": first_adapters(config)})
        made = cls(
            parallel,
            config.trainer,
            config.model,
            config.rollout,
            config.algorithm,
            config.optimizer,
            config.train,
            adapter,
            takes_turns=takes_turns,
            publishes_adapters=config.publishes_adapters,
        )
        require_nodes(made._algorithm, config.pipeline.nodes)
        return made

    def windows(
        self, order: TrainingOrder, together: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[Window]:
        """See `GroupFeed.windows`. The first comes when all groups have, if the algorithm needs the batch's totals.

        `together` is around the collective that adds these up: until then a replica whose rollouts fail is alone.
        """
        windows = self._feed.windows(order)
        if self._algorithm.needs.totals:
            windows = iter(self._with_totals(list(windows), together))
        return windows

    def accumulate(self, window: Window) -> list[GroupProof]:
        """Adds the gradient of a window; returns its groups' ledger rows on one rank per replica, none elsewhere.

        Groups that have no gradient are run forward only, for their rows and for the metrics and count of the batch.

        Raises:
            ConfigError: a token id is outside the model's vocabulary, or a group is too long for the algorithm.
        """
        groups = [group for micro_batch in window for group in micro_batch]
        for group in groups:
            require_known_tokens(group, self._shape.vocab_size)
            if self._algorithm.needs.whole_groups:
                require_one_micro_batch(group, self._section.micro_batch_tokens, self._config.name)
        self.turns.onload()
        for frozen in self._frozen:
            frozen.prefetch()
        with_gradient, without = by_gradient(window, self._has_gradient)
        trained, untrained = self._passes(with_gradient), self._passes(without)
        passes = [*trained, *untrained]
        ref_logprobs = logprobs_of(self.models.reference, passes, self.device_watch.each)
        old_logprobs = logprobs_of(self.models.old, passes, self.device_watch.each)
        teacher_logprobs = logprobs_of(self.models.teacher, passes, self.device_watch.each)
        self._sums.begin(groups, self._reward_kl(passes, ref_logprobs), self._totals)
        advantages: Sequence[list[torch.Tensor] | None] = [None] * len(passes)
        if self.critic is not None:
            old_values = logprobs_of(self.critic.old, passes, self.device_watch.each)
            advantages = self.critic.train(
                self.device_watch.each(passes), self._sums.responses_of, ref_logprobs, old_values
            )
        losses = [
            functools.partial(self._loss_of, a_pass, others)
            for a_pass, *others in zip(passes, old_logprobs, ref_logprobs, teacher_logprobs, advantages, strict=True)
        ]
        for a_pass, loss_of in zip(self.device_watch.each(trained), losses[: len(trained)], strict=True):
            a_pass.train(self.models.policy, loss_of)
        with self.models.policy_to_score() as policy:
            for a_pass, loss_of in zip(self.device_watch.each(untrained), losses[len(trained) :], strict=True):
                a_pass.forward(policy, loss_of)
        self._sums.note_untrained(sum(counts_group(group) for groups in without for group in groups))
        return self._sums.take_rows(groups) if self._parallel.reports else []

    def _has_gradient(self, group: Group) -> bool:
        """Whether a group has any gradient: by its rewards, or by what a node of the pipeline adds to its tokens'."""
        if group.responses[0].token_rewards is not None:
            return True
        return self._algorithm.has_gradient(Rollouts.of(group))

    def score(self, prompt_token_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each response's tokens under the current policy, after temperature, as rollouts report them.

        All ranks call it with the same tokens, between two windows, and all get the result.

        Raises:
            ConfigError: a token id is outside the model's vocabulary.
        """
        group = unscored_group(prompt_token_ids, responses)
        require_known_tokens(group, self._shape.vocab_size)
        passes = self._passes([[group]])
        with self.turns.weights(), self.models.policy_to_score() as policy:
            parts = [part for a_pass in passes for part in a_pass.logprobs(policy)]
        logprobs_N = torch.cat(parts).tolist() if self._parallel.reports else []
        # Every replica has scored them; the first result is used.
        answer = iter(next(part for part in self._parallel.gather_json(logprobs_N) if part))
        return [list(islice(answer, len(response))) for response in responses]

    def optimizer_step(self) -> StepStats:
        """Ends a mini-batch: one all-reduce of the gradient sums, one division, clip, step; waits for all replicas.

        A gradient that is not finite leaves weights, moments and old policy unchanged.

        Raises:
            NonFiniteGradient: on all ranks, if too many steps in a row were skipped.
            UpdatesRoundedAway: on all ranks, if the last publishes were without what an adapter has learned.
        """
        # A replica that got no group has not needed its memory until now.
        self.turns.onload()
        totals = self._own_totals() if self._parallel.reports else {}
        merges = {} if self._merges is None else self._merges.merges_of_rank()
        of_ranks = self._parallel.gather_json([totals, memory_peaks(self._parallel.device.DEVICE), merges])
        of_merges: dict[str, float] = {}
        if self._merges is not None:
            of_merges = self._merges.merged_share((merges for *_, merges in of_ranks), is_new=self._samples)
        sums = Counter(added(part for part, *_ in of_ranks))
        totals = {name.removeprefix("total/"): value for name, value in sums.items() if name.startswith("total/")}
        assert sums["tokens"], "optimizer_step() without an accumulated group"
        # Where nothing counts the gradient is 0.
        denominator = require_denominator(self._algorithm, self._algorithm.denominator(totals)) or 1.0
        policy = self.models.policy
        finalize_model_grads([policy])
        policy.scale_gradients(1.0 / denominator)
        if self.critic is not None:
            self.critic.finish_gradients(sums["tokens"])
        norms = self._gradient_norms()
        self.turns.wait_for_states()
        learning_rate = self.optimizer.learning_rate
        skipped = not all(map(math.isfinite, norms))
        if skipped:
            self._skip(next(norm for norm in norms if not math.isfinite(norm)))
        else:
            if self._old_policy == "lagged":
                self._refresh_old()
            for optimizer, norm in zip(self._optimizers, norms, strict=True):
                optimizer.step(norm)
        self.discard()
        self._samples = False
        metrics = {
            name.removeprefix("metric/"): value / sums["tokens"]
            for name, value in sums.items()
            if name.startswith("metric/")
        }
        grad_norm, *norm_of_critic = norms
        if self.critic is not None:
            metrics |= self.critic.metrics(sums, sums["tokens"]) | {"critic_grad_norm": norm_of_critic[0]}
        loss = sums["loss"] / denominator
        metrics |= of_merges
        peaks = [highest(each) for each in zip(*(peaks for _, peaks, _ in of_ranks), strict=True)]
        return StepStats(loss, grad_norm, learning_rate, metrics, int(sums["untrained"]), skipped, *peaks)

    def discard(self) -> None:
        """Drops what has been accumulated since the last step."""
        if not self.turns.is_away:
            self.models.policy.zero_grad_buffer()
            if self.critic is not None:
                self.critic.discard()
        self._sums.clear()
        self._totals = None

    def before_publish(self) -> None:
        """Called before rollouts use the current weights: an old model that represents the sampler copies them.

        So does that of the critic's old values. Then the device is the instances'.
        """
        self._samples = True
        if self._old_policy == "model":
            self._refresh_old()
        if self.critic is not None:
            self.critic.refresh_old()
        self.turns.offload()

    def save_hf(self, path: Path) -> None:
        """Writes the policy as a Hugging Face checkpoint to `path`."""
        save_hf_checkpoint(self.models.policy_model, self.checkpoint, path)

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        """The rows of all ranks, in order of ranks; waits until every rank has finished its groups."""
        gathered = self._parallel.gather_json([asdict(row) for row in rows])
        return [GroupProof.from_json(row) for part in gathered for row in part]

    @property
    def cuts_groups(self) -> bool:
        """Whether replicas may train a group in pieces: no loss and no advantage needs the tokens of all rollouts."""
        return not (self._algorithm.needs.whole_groups or self._algorithm.needs.reward_kl)

    @property
    def lagged_old(self) -> Frozen | None:
        """The old policy if it does not follow from the policy, and so has to be saved in checkpoints."""
        return self.models.old if self._old_policy == "lagged" else None

    def _passes(self, window: Window) -> list[Pass]:
        return make_passes(window, self._parallel, self._temperature, self._section.micro_batch_tokens)

    def _loss_of(
        self,
        a_pass: Pass,
        others: Sequence[list[torch.Tensor] | None],
        number: int,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        log_ratios_KN: torch.Tensor,
    ) -> torch.Tensor:
        """The loss of a pass's micro-batch; `others`: what the other models give for each of its micro-batches."""
        of_others = [given[number] if given else None for given in others]
        log_ratios = log_ratios_KN if self._samples else None
        return self._sums.add(a_pass.micro_batches[number], logprobs_N, entropy_N, *of_others, log_ratios_KN=log_ratios)

    def _with_totals(self, windows: list[Window], together: Callable[[], AbstractContextManager[None]]) -> list[Window]:
        """A mini-batch's windows, of which the totals over all replicas are known from now on."""
        sums = []
        for group in (group for window in windows for groups in window for group in groups):
            if counts_group(group):
                sums.append(self._algorithm.sums(Rollouts.of(group)))
        with together():
            of_ranks = self._parallel.gather_json(added(sums) if self._parallel.reports else {})
        self._totals = added(of_ranks)
        return windows

    def _reward_kl(
        self, passes: Sequence[Pass], ref_logprobs: Sequence[list[torch.Tensor] | None]
    ) -> dict[int, tuple[float, ...]]:
        """See `rollout_kl`; empty where the algorithm does not need it."""
        if not self._algorithm.needs.reward_kl:
            return {}
        return rollout_kl((a_pass.micro_batches for a_pass in passes), ref_logprobs, self._config.kl_estimator)

    @property
    def _frozen(self) -> list[Frozen]:
        """In the order of their use."""
        of_critic = self.critic.old if self.critic is not None else None
        return [*self.models.frozen, *([of_critic] if of_critic is not None else [])]

    @property
    def _trained(self) -> list[tuple[DistributedDataParallel, PolicyOptimizer]]:
        policy = (self.models.policy, self.optimizer)
        return [policy] if self.critic is None else [policy, (self.critic.model, self.critic.optimizer)]

    @property
    def _optimizers(self) -> list[PolicyOptimizer]:
        return [optimizer for _, optimizer in self._trained]

    def _own_totals(self) -> dict[str, float]:
        return self._sums.totals() | (self.critic.totals() if self.critic is not None else {})

    def _gradient_norms(self) -> list[float]:
        """The gradient norm of each optimizer, over all ranks: they take the step together or not at all."""
        of_ranks = self._parallel.gather_json([optimizer.gradient_norm() for optimizer in self._optimizers])
        return [
            next((norm for norm in norms if not math.isfinite(norm)), norms[self._parallel.rank])
            for norms in zip(*of_ranks, strict=True)
        ]

    def _skip(self, grad_norm: float) -> None:
        for optimizer in self._optimizers:
            optimizer.skip(grad_norm)
        if self._parallel.is_main:
            counts = self.optimizer.counts
            log.error(
                "step %d: the gradient norm is %s: NO STEP WAS TAKEN, the weights stay as they are (%d in a row, %d in "
                "all)",
                *(counts.all - 1, grad_norm, counts.skipped_in_a_row, counts.skipped),
            )

    def _refresh_old(self) -> None:
        assert self.models.old is not None
        self.models.old.copy_from(self.models.policy_model)
