"""Changes and restores the policy's weights by classes, so that a publish can show which of them an engine applies.

A weight is changed by flipping one of its bits, so a second flip restores it, bit for bit, without a copy. Which bit
depends only on the requested strength, so ranks need no coordination: every layout of the model, and every replica,
changes the same weights in the same way. About half of them grow and half shrink, depending on their own bits, so that
no class is merely scaled, which a following norm or softmax would undo.

Constant tensors, which a search for a wrong class needs, are the exception: the true ones are kept on the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from async_rl.shared.protocol.sender import ALL_STRENGTHS, CONSTANT
from async_rl.shared.tensor_classes import CLASS_OF, EMBEDDING, EXPERT, EXPERTS, HEAD, ROUTER, class_of
from trainer.hf.fusions import Fusion
from trainer.hf.weight_map import Layout, WeightEntry, tied_head, weight_map
from trainer.model.gpt import RankModel
from trainer.parallel import Parallel

ORDER = tuple(CLASS_OF.values())

MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}

ZERO_VALUES = (0.0625, 0.25, 1.0)
"""Values, by strength, of a part of a tensor that is all zero, as new biases are: flipped bits of 0 do too little."""


def constant_of(hf_name: str, hf_shape: tuple[int, ...], expert: int) -> float:
    """The value that a constant tensor has, whatever the layout of the ranks: its outputs are of a usual size, but what
    it adds to the residual stream is small or nothing, since that is the same in all places, and would hide the rest.

    Neighbouring experts have different ones, so that the router's choice shows; `expert` is the number, 0 for all to
    have the same.
    """
    name = class_of(hf_name)
    if name.endswith("norm"):
        return 1.0
    if name in ("o", "delta o"):
        return 0.0
    size = 0.1 if name.endswith("down") else 1.0
    return float(size * (1 + expert % 8 / 8) * hf_shape[-1] ** -0.5)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of this rank: the class, the original first value and whether it is zero, for each of its parts."""

    bits: torch.Tensor
    fusion: Fusion
    hf_shapes: Mapping[str, tuple[int, ...]]
    classes: tuple[str, ...]
    first: tuple[int, ...]
    is_zero: tuple[bool, ...]
    experts: range
    """The numbers of those that its parts have, one after the other along dimension 0, or all of one; none."""

    def filled(self, part: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
        """A part's like, with the value of each expert, or the only one."""
        by_expert = torch.tensor(values, dtype=part.dtype, device=part.device)
        return by_expert.view(-1, *[1] * (part.dim() - 1)).expand_as(part)


class CanaryWeights:
    """The weights of one rank's `model`; to be created while they are unchanged."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._dtype = next(model.parameters()).dtype
        self._strengths: dict[str, int] = {}
        self._parameters: list[_Parameter] | None = None
        self._true: dict[int, torch.Tensor] = {}
        """The bits of each parameter that has constant parts, by its index, on the host."""
        names = {class_of(name) for entry in weight_map(model.shape) for name in entry.hf_shapes}
        self.classes: tuple[str, ...] = tuple(sorted(names | ({HEAD} if model.shape.tied else set()), key=_place))
        """All classes of the model, the same on every rank."""
        self.one_tensor: tuple[str, ...] = (EMBEDDING, HEAD) if model.shape.tied else ()
        """Classes that are published as one tensor, but may be two copies in an engine."""

    @property
    def are_changed(self) -> bool:
        """Whether `restore` is due."""
        return self._parameters is not None

    def change(self, strengths: Mapping[str, int]) -> None:
        """Sets every class to its strength, 1 to `ALL_STRENGTHS`, or makes its tensors `CONSTANT`; classes left out get
        their true weights."""
        if self._parameters is None:
            self._parameters = self._read_parameters()
        for index, parameter in enumerate(self._parameters):
            before, after = (
                [these.get(name, 0) for name in parameter.classes] for these in (self._strengths, strengths)
            )
            if CONSTANT in before:
                self._put_back(index)
                before = [0] * len(before)
            if CONSTANT in after:
                _flip(parameter, self._masks(parameter, before))
                self._true[index] = parameter.bits.to("cpu", copy=True)
                self._set_constant(parameter, after, strengths)
            else:
                flips = zip(self._masks(parameter, before), self._masks(parameter, after), strict=True)
                _flip(parameter, [a ^ b for a, b in flips])
        self._strengths = dict(strengths)
        self._set_head()
        if not strengths:
            # All are true again. Read again next time: training changes the weights until then.
            self._parameters = None

    def restore(self) -> None:
        """Restores the true weights wherever an error or a signal left a change; needs no other rank."""
        for index, parameter in enumerate(self._parameters or ()):
            self._put_back(index)
            now = _first_bits(parameter.bits, parameter.fusion)
            _flip(parameter, [a ^ b for a, b in zip(now, parameter.first, strict=True)])
        # Read again next time: training changes the weights until then.
        self._parameters = None
        self._strengths = {}
        self._model.chunks[-1].other_head = None

    def _put_back(self, index: int) -> None:
        """Restores a parameter with constant parts; a signal finds it constant and kept, or true."""
        assert self._parameters is not None
        if index in self._true:
            self._parameters[index].bits.copy_(self._true[index])
            del self._true[index]

    def _set_constant(self, parameter: _Parameter, strengths: Sequence[int], of_all: Mapping[str, int]) -> None:
        """Changes a true parameter, of which parts become constant, in one operation."""
        tells_experts = of_all.get(ROUTER) != CONSTANT
        parts = parameter.fusion.split(parameter.bits)
        changed = []
        masks = self._masks(parameter, strengths)
        for part, strength, mask, hf in zip(parts, strengths, masks, parameter.hf_shapes.items(), strict=True):
            numbers = parameter.experts if tells_experts and len(parameter.experts) else [0]
            values = [self._bits_of(constant_of(*hf, number)) for number in numbers]
            changed.append(parameter.filled(part, values) if strength == CONSTANT else part ^ mask)
        parameter.bits.copy_(parameter.fusion.merge(changed))

    def _read_parameters(self) -> list[_Parameter]:
        model = self._model
        layout = Layout.of(model.parallel)
        head = tied_head(model.shape, layout)
        by_name = dict(model.named_parameters())
        found = []
        for entry in (*weight_map(model.shape, layout), *([head] if head else [])):
            if entry.is_on(model.parallel):
                bits = entry.of(by_name).detach().view(BITS[self._dtype])
                fusion = entry.on(model.parallel.tp_rank).fusion
                classes = (HEAD,) if entry is head else tuple(map(class_of, entry.hf_shapes))
                is_zero = tuple(not bool(part.any()) for part in fusion.split(bits))
                first = _first_bits(bits, fusion)
                experts = _experts_of(entry, model.parallel)
                found.append(_Parameter(bits, fusion, entry.hf_shapes, classes, first, is_zero, experts))
        return found

    def _set_head(self) -> None:
        """Gives the head its own copy where one parameter is both embedding and head and they are to differ."""
        model = self._model.chunks[-1]
        model.other_head = None
        if not model.shape.tied or model.parallel.pp_size > 1:
            return
        mask = self._mask(self._strengths.get(EMBEDDING, 0), False) ^ self._mask(self._strengths.get(HEAD, 0), False)
        if mask:
            bits = model.shared_embedding_or_output_weight().detach().view(BITS[self._dtype])
            model.other_head = (bits ^ mask).view(self._dtype)

    def _masks(self, parameter: _Parameter, strengths: Sequence[int]) -> list[int]:
        return [self._mask(*each) for each in zip(strengths, parameter.is_zero, strict=True)]

    def _bits_of(self, value: float) -> int:
        return int(torch.tensor(value, dtype=self._dtype).view(BITS[self._dtype]))

    def _mask(self, strength: int, is_zero: bool) -> int:
        """The bits that a strength flips: it changes a weight by 12-25%, by 25-50%, or by a factor of 2, up or down."""
        assert CONSTANT <= strength <= ALL_STRENGTHS, strength
        if strength in (0, CONSTANT):
            return 0
        if is_zero:
            return self._bits_of(ZERO_VALUES[strength - 1])
        return 1 << (MANTISSA_BITS[self._dtype] - 3 + strength)


def _experts_of(entry: WeightEntry, parallel: Parallel) -> range:
    """The numbers of the experts whose matrices a rank has in an entry."""
    if entry.has_experts:
        rows, *_ = entry.shards(*entry.share_of(parallel))[0].slices[0]
        return range(rows.start, rows.stop)
    found = EXPERTS.search(next(iter(entry.hf_shapes)))
    return range(int(found[1]), int(found[1]) + 1) if found else range(0)


def _place(name: str) -> tuple[int, str]:
    """Of a class in `SenderFacts.classes`; experts are beside the gate, up and down projections of dense layers."""
    return ORDER.index(name.removeprefix(EXPERT)), name


def _flip(parameter: _Parameter, masks: list[int]) -> None:
    """Flips bits of each part. One operation writes a parameter: a signal finds all of it changed, or none."""
    if not any(masks):
        return
    if len(masks) == 1:
        parameter.bits.bitwise_xor_(masks[0])
        return
    parts = parameter.fusion.split(parameter.bits)
    parameter.bits.copy_(parameter.fusion.merge([part ^ mask for part, mask in zip(parts, masks, strict=True)]))


def _first_bits(bits: torch.Tensor, fusion: Fusion) -> tuple[int, ...]:
    # A rank may have no row of a part.
    return tuple(int(part.flatten()[0]) if part.numel() else 0 for part in fusion.split(bits))
