"""A model without gradients, whose weights are kept on the device or on the host between uses.

On the host they are in pinned memory if there is an accelerator; they are copied to the device on a separate stream
ahead of use, and the device's copy is freed right after, as MindSpeed RL does with its update weights (arXiv
2507.19017).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from trainer.model.gpt import SharedPromptGPT


class FrozenModel:
    """`model` under a placement; with "host" its parameters are empty on the device between uses."""

    def __init__(self, model: SharedPromptGPT, placement: Literal["device", "host"], device: torch.device) -> None:
        self._model = model.requires_grad_(False).eval()
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._on_host: dict[str, torch.Tensor] | None = None
        self._is_resident = True
        if placement == "host":
            self._on_host = {name: self._host_copy(p.data) for name, p in model.named_parameters()}
            self._let_go()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The model's parameters; empty tensors while their weights are on the host."""
        parameters: Iterator[torch.nn.Parameter] = self._model.parameters()
        return parameters

    def copy_from(self, source: SharedPromptGPT) -> None:
        """Copies the weights of `source`, a model of the same shape and layout."""
        weights = dict(source.named_parameters())
        for name, parameter in self._model.named_parameters():
            target = parameter.data if self._on_host is None else self._on_host[name]
            target.copy_(weights[name].data)

    def prefetch(self) -> None:
        """Starts copying weights from the host to the device, without waiting."""
        if self._on_host is None or self._is_resident:
            return
        self._is_resident = True
        parameters = dict(self._model.named_parameters())
        # Allocated on the computing stream: memory freed there may be reused only after its pending work.
        for name, parameter in parameters.items():
            parameter.data = torch.empty_like(self._on_host[name], device=self._device)
        with self._copying():
            for name, parameter in parameters.items():
                parameter.data.copy_(self._on_host[name], non_blocking=True)

    @contextmanager
    def resident(self) -> Iterator[SharedPromptGPT]:
        """The model with its weights on the device, without gradients, inside the context."""
        self.prefetch()
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        try:
            with torch.no_grad():
                yield self._model
        finally:
            if self._on_host is not None:
                self._let_go()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Work inside runs on the copy stream, after everything already queued on the computing stream."""
        if self._stream is None:
            yield
            return
        computing = torch.accelerator.current_stream()
        self._stream.wait_stream(computing)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(computing)

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.to("cpu", copy=True)
        return copy if self._stream is None else copy.pin_memory()

    def _let_go(self) -> None:
        self._is_resident = False
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
