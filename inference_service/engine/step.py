"""One step of the model: the work of a schedule as tensors, and the logits that come out."""

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from async_rl.errors import ConfigError
from async_rl.shared.cpu import exact
from async_rl.shared.cpu.products import use_faster_products
from async_rl.shared.layer_windows import SLIDING
from inference_service.engine import attention
from inference_service.engine.delta_net import delta_net_of, use_delta_nets
from inference_service.engine.kernels import FASTEST, Kernels
from inference_service.engine.kv_store import Place
from inference_service.engine.parts import SharedPart, Span, StepParts, delta_part, own_parts, place_of, shared_parts
from inference_service.engine.routes import Routes
from inference_service.engine.schedule import Fed, Run, Work
from inference_service.engine.segments import Link, Segment


class ExactLinear(torch.nn.Linear):
    """torch's, with another forward: for inference only."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return exact.linear(input, self.weight, self.bias)


class ExactSiLU(torch.nn.Module):
    """The activation of the feed-forward parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact.silu(x)


def use_exact(model: PreTrainedModel) -> None:
    """Replaces activations and linear layers; norms and rotary embedding are exact as they are.

    Raises:
        ConfigError: another activation than SiLU, layers with a window, or gated delta nets.
    """
    if delta_net_of(model.config) is not None:
        raise ConfigError(
            f"the model is of {model.config.model_type!r}: exact mode (train.exact, --exact) is for models without "
            "linear attention; serve it without"
        )
    kinds, window = getattr(model.config, "layer_types", None), getattr(model.config, "sliding_window", None)
    if window is not None and (kinds is None or SLIDING in kinds):
        raise ConfigError(
            f"the model has layers with a window (sliding_window {window}): exact mode (train.exact, --exact) is for "
            "attention to all tokens; serve it without"
        )
    silu = type(ACT2FN["silu"])
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            # A module around it would change the names of the weights.
            module.__class__ = ExactLinear
        activation = getattr(module, "act_fn", None)
        if activation is None:
            continue
        if not isinstance(activation, silu | ExactSiLU):
            raise ConfigError(
                f"the model has the activation {type(activation).__name__}: exact mode (train.exact, --exact) is for "
                "SiLU; serve it without"
            )
        module.act_fn = ExactSiLU()


@dataclass(frozen=True, slots=True)
class Drawing:
    """The runs that get a token now, and their logits, float32 [runs, V]; what was fed of prompts that are scored, each
    with the logits of its targets, float32 [targets, V]."""

    runs: Listing[Run]
    logits: torch.Tensor
    scored: Listing[tuple[Fed, torch.Tensor]]


class ModelStep:
    """Runs a model on the work of one step after the other."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels = FASTEST) -> None:
        if kernels.is_exact:
            use_exact(model)
        elif model.device.type == "cpu":
            use_faster_products(model)
        self._kernels = kernels
        self._delta = delta_net_of(model.config)
        if self._delta is not None:
            use_delta_nets(model, self._delta)
        model.set_attn_implementation(attention.NAME)
        self._model = model
        self._device = model.device
        self._shared: tuple[object, list[SharedPart]] = (None, [])
        self.routes = Routes(model)

    def __call__(self, work: Work, generation: int) -> Drawing:
        """Computes the work, and notes what is done; `generation` is the store's."""
        decoding = sorted(work.decoding, key=lambda run: (place_of(run).shelf.capacity, place_of(run).slot))
        token_ids = [run.unfed(1)[0] for run in decoding]
        positions = [run.sequence.num_tokens - 1 for run in decoding]
        spans, runs, rows = [], list(decoding), list(range(len(decoding)))
        rows_of: list[tuple[Fed, range]] = []
        for fed in work.fed:
            begin = len(token_ids)
            start, links, place, before = _span_of(fed)
            token_ids += fed.token_ids
            positions += range(before, before + len(fed.token_ids))
            spans.append(Span(slice(begin, len(token_ids)), place, start, links, before - start))
            runs += fed.draws
            rows += [len(token_ids) - 1] * len(fed.draws)
            if fed.targets:
                rows_of.append((fed, range(begin, begin + len(fed.targets))))
        num_padding = -len(token_ids) % self._kernels.row_multiple
        token_ids += [0] * num_padding
        positions += [0] * num_padding
        parts = StepParts(
            self._kernels,
            len(decoding),
            own_parts(decoding, self._device, self._kernels.width),
            self._shared_parts(decoding, generation),
            spans,
            torch.tensor(positions[: len(decoding)], device=self._device),
            1 + max(positions),
            num_padding,
            None if self._delta is None else delta_part(decoding, work.fed, self._delta.conv_width, self._device),
        )
        kept = sorted({*rows, *(row for _, scored in rows_of for row in scored)})
        kept += [len(token_ids) - 1] * (-len(kept) % self._kernels.row_multiple)
        logits = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            attention_mask=None,
            parts=parts,
            use_cache=False,
            logits_to_keep=torch.tensor(kept, dtype=torch.long, device=self._device),
        ).logits[0]
        self.routes.keep(parts)
        for run in decoding:
            run.num_fed += 1
        for fed in work.fed:
            if isinstance(fed.what, Segment):
                fed.what.num_done += len(fed.token_ids)
            else:
                fed.what.num_fed += len(fed.token_ids)
        index = {row: i for i, row in enumerate(kept)}
        scored = [(fed, logits[index[its[0]] : index[its[0]] + len(its)].float()) for fed, its in rows_of]
        if kept != rows:
            logits = logits[torch.tensor([index[row] for row in rows], dtype=torch.long, device=self._device)]
        return Drawing(runs, logits.float(), scored)

    def forget(self) -> None:
        """Keys and values of earlier steps are not there any more."""
        self._shared = (None, [])

    def _shared_parts(self, decoding: Listing[Run], generation: int) -> list[SharedPart]:
        """The same from step to step, as long as the same runs decode and no segment moved."""
        key = (generation, tuple(decoding))
        if self._shared[0] != key:
            self._shared = (key, shared_parts(decoding, self._device, self._kernels.width))
        return self._shared[1]


def _span_of(fed: Fed) -> tuple[int, tuple[Link, ...], Place, int]:
    """Where its tokens begin in their place, what is before that, the place, and the first position."""
    if isinstance(fed.what, Segment):
        segment = fed.what
        return segment.num_done, segment.links[1:], segment.place, segment.num_before + segment.num_done
    run = fed.what
    return run.num_fed, run.links, place_of(run), run.num_shared + run.num_fed
