"""A model without gradients, whose weights are kept on the device or on the host between uses.

On the host they are in pinned memory if there is an accelerator; they are copied to the device on a separate stream
ahead of use, and the device's copy is freed right after, as MindSpeed RL does with its update weights (arXiv
2507.19017).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from async_rl.shared.weights.swap import Swap, copy_stream, on_host
from trainer.model.gpt import RankModel


class FrozenModel:
    """`model` under a placement; with "host" its weights leave the device between uses."""

    def __init__(self, model: RankModel, placement: Literal["device", "host"], device: torch.device) -> None:
        self._model = model.requires_grad_(False).eval()
        self._swap = Swap(model.parameters(), copy_stream(device))
        self._stays = placement == "device"
        if not self._stays:
            self._swap.to_host()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The model's parameters, whose values may be on the host: `on_host` has them."""
        parameters: Iterator[torch.nn.Parameter] = self._model.parameters()
        return parameters

    def copy_from(self, source: RankModel) -> None:
        """Copies the weights of `source`, a model of the same shape and layout, wherever both are."""
        weights = dict(source.named_parameters())
        for name, parameter in self._model.named_parameters():
            on_host(parameter.data).copy_(on_host(weights[name].data))

    def prefetch(self) -> None:
        """Starts copying weights from the host to the device, without waiting."""
        self._swap.prefetch()

    def to_host(self) -> None:
        """The weights leave the device until they are used."""
        self._swap.to_host()

    @contextmanager
    def resident(self) -> Iterator[RankModel]:
        """The model with its weights on the device, without gradients, inside the context."""
        self._swap.prefetch()
        self._swap.wait()
        try:
            with torch.no_grad():
                yield self._model
        finally:
            if not self._stays:
                self._swap.discard()
