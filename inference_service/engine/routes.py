"""Which experts each row was sent to: read where the model's routers choose, and kept beside keys and values.

A prompt that responses share, or that was kept from an earlier request, is computed once; so its routes are kept with
its keys, and a response's are put together at its end.

Shapes: T rows of a step, L layers, k experts of each row, W = L k.
"""

import re
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from async_rl.shared.protocol.routed_experts import RouteShape
from inference_service.engine.parts import StepParts, place_of
from inference_service.engine.schedule import Run

ROUTER = re.compile(r"model\.layers\.(\d+)\.mlp\.(?:gate|router)")
"""What these modules return last are the numbers of the chosen experts, [T, k]."""


class Routes:
    """The routers of a model, each of which is asked once in a step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._chosen: dict[int, torch.Tensor] = {}
        gates = {int(found[1]): gate for name, gate in model.named_modules() if (found := ROUTER.fullmatch(name))}
        self.shape: RouteShape | None = None
        """None for a dense model."""
        if gates:
            gate: Any = next(iter(gates.values()))
            self.shape = RouteShape(int(model.config.num_hidden_layers), int(gate.top_k), int(gate.weight.shape[0]))
        for layer, gate in gates.items():
            gate.register_forward_hook(partial(self._note, layer))

    @property
    def width(self) -> int:
        """W; 0 for a dense model."""
        return 0 if self.shape is None else self.shape.num_layers * self.shape.num_chosen

    def keep(self, parts: StepParts) -> None:
        """Puts the routes of the step's rows beside their keys."""
        if self.shape is None:
            return
        (some, *_), chosen = self._chosen.values(), self._chosen
        none_Tk = torch.zeros_like(some)
        routes_TW = torch.cat([chosen.get(layer, none_Tk) for layer in range(self.shape.num_layers)], 1).short()
        self._chosen = {}
        for part in parts.own:
            part.shelf.routes[0][part.slots, 0, part.positions] = routes_TW[part.queries]
        for span in parts.spans:
            rows_TW = routes_TW[span.queries]
            span.place.shelf.routes[0][span.place.slot, 0, span.start : span.start + len(rows_TW)] = rows_TW

    def of(self, run: Run) -> npt.NDArray[Any]:
        """All of a response's rows and its prompt's, as `protocol/routed_experts.py` has them."""
        assert self.shape is not None, "a dense model has no routes"
        pieces = [
            link.place.shelf.routes[0][link.place.slot, 0, : link.length] for link in reversed(run.links) if link.length
        ]
        if run.num_fed:
            own = place_of(run)
            pieces.append(own.shelf.routes[0][own.slot, 0, : run.num_fed])
        routes_TW = torch.cat(pieces).cpu().numpy()
        return routes_TW.astype(self.shape.dtype).reshape(-1, self.shape.num_layers, self.shape.num_chosen)

    def _note(self, layer: int, _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._chosen[layer] = output[-1]
