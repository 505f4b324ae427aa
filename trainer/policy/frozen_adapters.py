"""A frozen model that differs from one in training by its adapters only, and so shares its weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.model.adapters import without_adapters
from trainer.model.gpt import RankModel


class FrozenAdapters:
    """The base below `model`, or with `keeps` what `model` was at the last `copy_from`; as a `FrozenModel`.

    The reference of a run with adapters is its base, and so without memory of its own.
    """

    def __init__(self, model: RankModel, *, keeps: bool) -> None:
        self._model = model
        self._kept = {name: p.detach().clone() for name, p in _trained(model).items()} if keeps else None

    def parameters(self) -> Iterator[torch.Tensor]:
        """What it has beside the weights of the model in training."""
        return iter((self._kept or {}).values())

    def copy_from(self, source: RankModel) -> None:
        """Copies the adapters of `source`, which has the same ones, and a critic's head."""
        assert self._kept is not None, "a base does not change"
        for name, parameter in _trained(source).items():
            self._kept[name].copy_(parameter.detach())

    def prefetch(self) -> None:
        """Does nothing: it is where the model in training is."""

    def to_host(self) -> None:
        """Does nothing, as well."""

    @contextmanager
    def resident(self) -> Iterator[RankModel]:
        """The model in training with the other adapters, or none, without gradients, inside the context."""
        was_training = self._model.training
        self._model.eval()
        swapped = self._swap()
        try:
            with torch.no_grad():
                if self._kept is None:
                    with without_adapters(self._model), _own_routes(self._model):
                        yield self._model
                else:
                    yield self._model
        finally:
            for parameter, value in swapped:
                parameter.data = value
            self._model.train(was_training)

    def _swap(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Sets the kept values; returns the others, which optimizer and gradient sums hold on to."""
        kept = self._kept or {}
        swapped = [(p, p.data) for name, p in _trained(self._model).items() if name in kept]
        for name, parameter in _trained(self._model).items():
            if name in kept:
                parameter.data = kept[name]
        return swapped


@contextmanager
def _own_routes(model: RankModel) -> Iterator[None]:
    """In its body the model chooses its experts itself: the base is not what rollouts were sampled from."""
    replays = model.chunks[0].replays
    for chunk in model.chunks:
        chunk.replays = False
    try:
        yield
    finally:
        for chunk in model.chunks:
            chunk.replays = replays


def _trained(model: RankModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
