"""The policy's weights as a stream of Hugging Face tensors, the form in which they are published and saved."""

from collections.abc import Iterator

import torch

from async_rl.weight_stream import TensorSpec
from trainer.hf_weights import weight_map
from trainer.model import SharedPromptGPT


def hf_stream(model: SharedPromptGPT) -> tuple[list[TensorSpec], Iterator[tuple[TensorSpec, torch.Tensor]]]:
    """(specs of all tensors, iterator over (spec, tensor) in the same order), in the model's dtype.

    A tensor is a view of the model's weights where it can be: it holds the weights of the moment, until the next step.
    """
    parameters = dict(model.named_parameters())
    specs = [
        TensorSpec(name, _dtype_name(parameters[entry.megatron_name]), shape)
        for entry in weight_map(model.shape)
        for name, shape in entry.hf_shapes.items()
    ]
    return specs, zip(specs, _tensors(model, parameters), strict=True)


def _tensors(model: SharedPromptGPT, parameters: dict[str, torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for entry in weight_map(model.shape):
        yield from entry.fusion.split(parameters[entry.megatron_name].detach())


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
