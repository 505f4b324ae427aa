"""What a training rank has on its device leaves it while the inference pool uses the same device
(`run.placement = "turns"`).

Within an iteration the devices belong to the trainer from the first window to the publish, and to the instances from
there to the end of the rollouts. Allgather-swap of MindSpeed RL (arXiv 2507.19017, section 4.2) does the same within
one program. The weights alone come back for as long as a publish reads them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from async_rl.shared.weights.swap import Swap, copy_stream
from trainer.policy.optimizer import PolicyOptimizer
from trainer.policy.tri_model import Frozen


class Turns:
    """The memory of one rank on its device, all of which leaves it.

    Args:
        trained: the models in training, the policy first, and their optimizers.
        frozen: further models.
        takes_turns: otherwise everything stays, and every method does nothing.
    """

    def __init__(
        self,
        trained: Sequence[tuple[DistributedDataParallel, PolicyOptimizer]],
        frozen: Sequence[Frozen],
        device: torch.device,
        *,
        takes_turns: bool,
    ) -> None:
        self._device = device
        self._frozen = frozen
        self._takes_turns = takes_turns
        self._parts: tuple[Swap, Swap, Swap, Swap] | None = None
        self._trained = trained
        self._is_away = False

    @property
    def is_away(self) -> bool:
        """Whether the instances have the device."""
        return self._is_away

    def offload(self) -> None:
        """Between two batches: everything goes to the host, but for the gradient sums, which are 0."""
        if not self._takes_turns or self._is_away:
            return
        for model in self._frozen:
            model.to_host()
        weights, others, states, gradients = self._storages()
        gradients.discard()
        for part in (weights, others, states):
            part.to_host()
        self._is_away = True
        self._give_back()

    def onload(self) -> None:
        """Everything comes back: weights first; the optimizers' states arrive while windows are trained.

        Raises:
            torch.OutOfMemoryError: the instances have left too little.
        """
        if not self._is_away:
            return
        self._is_away = False
        weights, others, states, gradients = self._storages()
        for part in (weights, others, gradients):
            part.prefetch()
        for model in self._frozen:
            model.prefetch()
        states.prefetch()
        for model, _ in self._trained:
            model.zero_grad_buffer()
        for part in (weights, others):
            part.wait()

    def wait_for_states(self) -> None:
        """The optimizers' states are there for what follows on the device."""
        if self._parts is not None:
            self._parts[2].wait()

    @contextmanager
    def weights(self, *, changes: bool = False) -> Iterator[None]:
        """The policy's weights are on the device inside the context, whoever has it; `changes`: they may be changed."""
        if not self._is_away:
            yield
            return
        weights = self._storages()[0]
        was_away = weights.is_away
        weights.prefetch()
        weights.wait()
        try:
            yield
        finally:
            if changes:
                weights.to_host()
            elif was_away:
                weights.discard()
            self._give_back()

    def _storages(self) -> tuple[Swap, Swap, Swap, Swap]:
        """The policy's weights; those of other models in training; the optimizers' states; the sums of gradients.

        Found when they are first needed: Megatron makes some of them after the models.
        """
        if self._parts is None:
            stream = copy_stream(self._device)
            (policy, _), *others = self._trained
            weights = Swap(_weights(policy), stream)
            rest = Swap((tensor for model, _ in others for tensor in _weights(model)), stream)
            known = weights.storages | rest.storages
            states = (
                tensor
                for _, optimizer in self._trained
                for state in optimizer.parameter_states()
                for tensor in (state.master, *state.moments.values())
            )
            apart = (tensor for tensor in states if Swap([tensor]).storages.isdisjoint(known))
            sums = (buffer.grad_data for model, _ in self._trained for buffer in _buffers(model))
            self._parts = weights, rest, Swap(apart, stream), Swap(sums, stream)
        return self._parts

    def _give_back(self) -> None:
        """Freed memory leaves this process, too."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()


def _buffers(model: DistributedDataParallel) -> Sequence[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]


def _weights(model: DistributedDataParallel) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter.data
    for buffer in _buffers(model):
        if buffer.param_data is not None:
            yield buffer.param_data
