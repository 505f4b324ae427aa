"""Prometheus metrics of the inference pool and of the balance of both pools; scraped at the fleet endpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from async_rl.rollouts.pool.member import Member
from async_rl.shared.protocol.fleet import InstanceInfo, InstanceState

RUN_GAUGES = {
    "iteration": ("async_rl_iteration", "The last complete iteration, counted from 0."),
    "idle_training": ("async_rl_idle_training", "Share of the last iteration in which the trainer waited."),
    "idle_inference": ("async_rl_idle_inference", "Share of the last iteration without rollouts under way."),
    "overlap_efficiency": (
        "async_rl_overlap_efficiency",
        "Least time of the last iteration, had the pools overlapped as far as they can, over its time.",
    ),
    "seconds": ("async_rl_iteration_seconds", "Duration of the last iteration."),
    "wait_s": ("async_rl_wait_seconds", "Time of the last iteration in which the trainer waited for rollouts."),
    "train_s": ("async_rl_train_seconds", "Forward and backward passes of the last iteration."),
    "step_s": ("async_rl_step_seconds", "Optimizer steps of the last iteration."),
    "publish_s": ("async_rl_publish_seconds", "Publish of the weights in the last iteration."),
    "tokens_per_s": ("async_rl_tokens_per_second", "Trained tokens of the last iteration per second."),
    "tpspd": ("async_rl_tokens_per_second_per_device", "The same per device of both pools."),
    "mfu": ("async_rl_mfu", "Share of the devices' peak that forward and backward passes reached."),
    "memory_peak_bytes": ("async_rl_trainer_memory_peak_bytes", "Host memory of the largest training rank."),
    "device_memory_peak_bytes": ("async_rl_trainer_device_memory_peak_bytes", "Device memory of the largest rank."),
    "reward_mean": ("async_rl_reward_mean", "Mean reward of the last iteration."),
    "accuracy": ("async_rl_accuracy", "Share of correct rollouts of the last iteration."),
    "response_tokens_mean": ("async_rl_response_tokens_mean", "Mean sampled tokens of a rollout."),
    "truncated_share": ("async_rl_truncated_share", "Share of rollouts that ended at a limit."),
    "untrained_groups": ("async_rl_untrained_groups", "Share of groups without a gradient."),
    "loss": ("async_rl_loss", "Loss of the last iteration."),
    "grad_norm": ("async_rl_grad_norm", "Gradient norm before clipping."),
    "learning_rate": ("async_rl_learning_rate", "Learning rate of the last iteration."),
    "entropy": ("async_rl_entropy", "Mean entropy of the policy at sampled tokens, in nats."),
    "kl": ("async_rl_kl", "Mean KL from the reference, where there is one."),
    "clip_fraction": ("async_rl_clip_fraction", "Share of tokens that the algorithm clipped."),
    "max_logprob_gap": ("async_rl_logprob_gap_max", "Largest gap of trainer and rollout log-probs, in nats."),
    "rollout_kl_k3": ("async_rl_rollout_kl", "KL of rollout from trainer (k3), in nats."),
    "desired_instances": ("async_rl_desired_instances", "How many instances would balance training and inference."),
    "num_continued": (
        "async_rl_responses_continued",
        "Responses of the last iteration that another instance took on from their prefix.",
    ),
    "num_resampled": (
        "async_rl_responses_resampled",
        "Responses of the last iteration that were begun again under the same seed.",
    ),
}
"""Gauges by their key in the records of `metrics.jsonl`; those appear that the last record has a number for."""

INSTANCE_GAUGES = {
    "outstanding_tokens": (
        "async_rl_instance_outstanding_tokens",
        "Expected tokens of the requests under way.",
    ),
    "num_requests": ("async_rl_instance_requests_running", "Requests under way."),
    "tokens_per_s": ("async_rl_instance_tokens_per_second", "Response tokens per second, recently."),
}
"""Gauges of each instance by the field of `InstanceInfo`."""

LABELS = ("instance", "url")


class FleetMetrics(Collector):
    """Reads the members at every scrape; the loop's records are passed to `record_iteration`."""

    def __init__(self, members: Callable[[], Sequence[Member]]) -> None:
        self._members = members
        self._record: Mapping[str, Any] = {}
        self._num_publishes = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def record_iteration(self, record: Mapping[str, Any]) -> None:
        """Stores the record of one more iteration, which began with a publish; from any thread."""
        self._num_publishes += 1
        self._record = record

    @property
    def desired_instances(self) -> int | None:
        """The number that would balance the pools; None before the first iteration is complete."""
        return self._record.get("desired_instances")

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        infos = [member.info() for member in self._members()]
        yield _states(infos)
        yield from _gauges(infos)
        yield from _counters(infos)
        record = self._record
        for key, (name, text) in RUN_GAUGES.items():
            if record.get(key) is not None:
                yield GaugeMetricFamily(name, text, value=record[key])
        yield CounterMetricFamily(
            "async_rl_weight_publishes", "Publishes whose iteration is complete.", value=self._num_publishes
        )


def _states(infos: Sequence[InstanceInfo]) -> Metric:
    """One row for each state of each instance, so that states can be counted: 1 for the present state."""
    family = GaugeMetricFamily("async_rl_instance_state", "1 for the instance's state.", labels=[*LABELS, "state"])
    for info in infos:
        for state in get_args(InstanceState):
            family.add_metric([info.name, info.url, state], float(info.state == state))
    return family


def _gauges(infos: Sequence[InstanceInfo]) -> Iterator[Metric]:
    for key, (name, text) in INSTANCE_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=LABELS)
        for info in infos:
            family.add_metric([info.name, info.url], getattr(info, key))
        yield family


def _counters(infos: Sequence[InstanceInfo]) -> Iterator[Metric]:
    tokens = CounterMetricFamily("async_rl_instance_tokens", "Response tokens received.", labels=LABELS)
    failures = CounterMetricFamily(
        "async_rl_instance_failures", "Requests that it failed or did not finish.", labels=LABELS
    )
    for info in infos:
        tokens.add_metric([info.name, info.url], info.num_tokens)
        failures.add_metric([info.name, info.url], info.num_failures)
    yield tokens
    yield failures
