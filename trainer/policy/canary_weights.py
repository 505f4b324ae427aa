"""Changes the policy's weights by classes, so that a publish can show which of them an engine takes over; and back.

A weight is changed by flipping one bit of it, so doing it again gives the weight back, bit for bit, without a copy.
Which bit depends on nothing but the strength asked for, so ranks need not agree on anything: every layout of the model,
and every replica, changes the same weights in the same way. About half of them grow and half shrink, by what their own
bits say, so that no class is only scaled, which a norm or a softmax behind it would undo.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from async_rl.publish.canary import ALL_STRENGTHS
from trainer.hf.weight_map import Fusion, Layout, tied_head, weight_map
from trainer.model.gpt import SharedPromptGPT

HEAD, EMBEDDING = "head", "embedding"
CLASS_OF = {
    "model.embed_tokens.weight": EMBEDDING,
    "lm_head.weight": HEAD,
    "model.norm.weight": "final norm",
    "input_layernorm.weight": "input norm",
    "post_attention_layernorm.weight": "post-attention norm",
    "self_attn.q_norm.weight": "q norm",
    "self_attn.k_norm.weight": "k norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q bias",
    "self_attn.k_proj.bias": "k bias",
    "self_attn.v_proj.bias": "v bias",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "mlp.gate.weight": "router",
}
"""Class of a tensor by the end of its Hugging Face name; experts' have "expert" before theirs."""

MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}

ZERO_VALUES = (0.0625, 0.25, 1.0)
"""What a part of a tensor that is all zero, as new biases are, becomes at each strength: no bit of it says anything."""


def class_of(hf_name: str) -> str:
    """The class of a tensor."""
    if hf_name in CLASS_OF:
        return CLASS_OF[hf_name]
    within_layer = hf_name.split(".", 3)[3]
    if within_layer.startswith("mlp.experts."):
        return "expert " + CLASS_OF["mlp." + within_layer.split(".", 3)[3]]
    return CLASS_OF[within_layer]


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of this rank: of each of its parts the class, the first value as it was, and whether it is zero."""

    bits: torch.Tensor
    fusion: Fusion
    classes: tuple[str, ...]
    first: tuple[int, ...]
    is_zero: tuple[bool, ...]


class CanaryWeights:
    """The weights of one rank's `model`; made when they are as they should be."""

    def __init__(self, model: SharedPromptGPT) -> None:
        self._model = model
        self._dtype = next(model.parameters()).dtype
        self._strengths: dict[str, int] = {}
        self._parameters: list[_Parameter] | None = None
        names = [name for entry in weight_map(model.shape) for name in entry.hf_shapes]
        self.classes: tuple[str, ...] = tuple(dict.fromkeys(map(class_of, names))) + (HEAD,) * model.shape.tied
        """All classes of the model, on every rank alike."""
        self.one_tensor: tuple[str, ...] = (EMBEDDING, HEAD) if model.shape.tied else ()
        """Those that are published as one tensor, but may be two copies in an engine."""

    def change(self, strengths: Mapping[str, int]) -> None:
        """Makes every class what it is at its strength, 1 to `ALL_STRENGTHS`; those left out are the true weights."""
        if self._parameters is None:
            self._parameters = self._read_parameters()
        for parameter in self._parameters:
            masks = [
                self._mask(self._strengths.get(name, 0), zero) ^ self._mask(strengths.get(name, 0), zero)
                for name, zero in zip(parameter.classes, parameter.is_zero, strict=True)
            ]
            _flip(parameter, masks)
        self._strengths = dict(strengths)
        self._set_head()

    def restore(self) -> None:
        """Gives back the true weights wherever an error, or a signal, left a change; this rank alone does it."""
        for parameter in self._parameters or ():
            now = _first_bits(parameter.bits, parameter.fusion)
            _flip(parameter, [a ^ b for a, b in zip(now, parameter.first, strict=True)])
        # Read anew next time: the weights train until then.
        self._parameters = None
        self._strengths = {}
        self._model.other_head = None

    def _read_parameters(self) -> list[_Parameter]:
        model = self._model
        layout = Layout.of(model.parallel)
        head = tied_head(model.shape, layout)
        by_name = dict(model.named_parameters())
        found = []
        for entry in (*weight_map(model.shape, layout), *([head] if head else [])):
            if entry.is_on(model.parallel):
                bits = by_name[entry.megatron_name].detach().view(BITS[self._dtype])
                parts = entry.fusion.split(bits)
                classes = (HEAD,) if entry is head else tuple(map(class_of, entry.hf_shapes))
                is_zero = tuple(not bool(part.any()) for part in parts)
                found.append(_Parameter(bits, entry.fusion, classes, _first_bits(bits, entry.fusion), is_zero))
        return found

    def _set_head(self) -> None:
        """Where one parameter is embedding and head, and they are to differ, gives the head a copy of its own."""
        model = self._model
        model.other_head = None
        if not model.shape.tied or model.parallel.pp_size > 1:
            return
        mask = self._mask(self._strengths.get(EMBEDDING, 0), False) ^ self._mask(self._strengths.get(HEAD, 0), False)
        if mask:
            bits = model.shared_embedding_or_output_weight().detach().view(BITS[self._dtype])
            model.other_head = (bits ^ mask).view(self._dtype)

    def _mask(self, strength: int, is_zero: bool) -> int:
        """The bits that a strength flips: a weight changes by 12-25%, by 25-50%, or twofold, up or down."""
        assert 0 <= strength <= ALL_STRENGTHS, strength
        if not strength:
            return 0
        if is_zero:
            return int(torch.tensor(ZERO_VALUES[strength - 1], dtype=self._dtype).view(BITS[self._dtype]))
        return 1 << (MANTISSA_BITS[self._dtype] - 3 + strength)


def _flip(parameter: _Parameter, masks: list[int]) -> None:
    """Flips bits of each part. One operation writes a parameter: a signal finds all of it changed, or nothing."""
    if not any(masks):
        return
    if len(masks) == 1:
        parameter.bits.bitwise_xor_(masks[0])
        return
    parts = parameter.fusion.split(parameter.bits)
    parameter.bits.copy_(parameter.fusion.merge([part ^ mask for part, mask in zip(parts, masks, strict=True)]))


def _first_bits(bits: torch.Tensor, fusion: Fusion) -> tuple[int, ...]:
    return tuple(int(part.flatten()[0]) for part in fusion.split(bits))
