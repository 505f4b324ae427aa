"""What the variants are, and how the first one trains: without shared prompts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from async_rl.loop import Window
from async_rl.method.types import Group
from benchmarks.common.unshared import samples_of
from trainer.batching.shared_prompt import MicroBatch, make_micro_batch
from trainer.forward_backward import PackedPass, Pass
from trainer.trainer import MegatronTrainer


class Variant(NamedTuple):
    """`shares`: whether training holds the prompt of a group once."""

    name: str
    shares: bool
    old_policy: str
    mode: str


VARIANTS = (
    Variant("naive", shares=False, old_policy="model", mode="synchronous"),
    Variant("shared_prompts", shares=True, old_policy="model", mode="synchronous"),
    Variant("no_old_model", shares=True, old_policy="reuse", mode="synchronous"),
    Variant("periodic", shares=True, old_policy="reuse", mode="periodic"),
)
"""Each has one thing more than the one before."""


class UnsharedTrainer(MegatronTrainer):
    """Trains every sample with a prompt of its own, `num_samples` in a micro-batch; all models do."""

    num_samples: int

    @classmethod
    def take_over(cls, trainer: MegatronTrainer, num_samples: int = 1) -> "UnsharedTrainer":
        """Makes `trainer`, which a session has made, one of this class."""
        trainer.__class__ = cls
        assert isinstance(trainer, cls)
        trainer.num_samples = num_samples
        return trainer

    def _passes(self, window: Window) -> list[Pass]:
        return [PackedPass(self._unshared(groups), self._temperature) for groups in window]

    def _unshared(self, groups: Sequence[Group]) -> list[MicroBatch]:
        samples = samples_of(groups)
        return [
            make_micro_batch(samples[i : i + self.num_samples], self._parallel.device.DEVICE)
            for i in range(0, len(samples), self.num_samples)
        ]


def fastest_num_samples(num_responses: int, seconds_with: Callable[[int], float], say: Callable[[str], None]) -> int:
    """The number of samples in a micro-batch, a power of two, with which a group is trained fastest.

    Larger micro-batches use the processor better until their activations leave its caches.
    """
    found: dict[int, float] = {}
    num_samples = 1
    while num_samples <= num_responses:
        found[num_samples] = seconds_with(num_samples)
        say(f"unshared, {num_samples} samples in a micro-batch: {found[num_samples]:.2f} s for a group")
        num_samples *= 2
    return min(found, key=found.__getitem__)
