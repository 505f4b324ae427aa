"""Gated delta nets in the embedded engine: transformers' layers with another forward, over the states of the store.

A layer takes the rows of a step as they are packed, where transformers' own takes whole batches. What it computes is
the trainer's (`async_rl/shared/delta_rule.py`): a token that decodes is a chunk of one row, a prompt is chunks of many.

Shapes: T rows of a step, R of them responses that decode, S sequences, E places of rows with the rows before them, L
places of rows in chunks, H key heads, Y value heads of each, B dimensions of a key, V of a value, X channels of the
convolution of one key head, W its width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from async_rl.shared.delta_rule import causal_convolution, gated_delta_rule
from async_rl.shared.layer_windows import LINEAR
from async_rl.shared.model_families import TABLE
from async_rl.shared.model_parts import DeltaNet
from inference_service.engine.parts import DeltaPart, StepParts


def has_delta_nets(config: PreTrainedConfig) -> bool:
    """Whether layers of linear attention are gated delta nets that this engine computes."""
    traits = TABLE.get(config.model_type)
    return traits is not None and traits.delta is not None


def delta_net_of(config: PreTrainedConfig) -> DeltaNet | None:
    """The sizes of a model's gated delta nets; None for a model without any."""
    kinds = getattr(config, "layer_types", None) or ()
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if not layers or not has_delta_nets(config):
        return None
    return DeltaNet(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        layers=layers,
    )


class DeltaNetLayer(torch.nn.Module):
    """A layer of transformers with another forward: for inference only."""

    delta: DeltaNet
    number: int
    """Which of the model's gated delta nets it is."""

    # As transformers names them.
    in_proj_qkvz: torch.nn.Module
    in_proj_ba: torch.nn.Module
    in_proj_qkv: torch.nn.Module
    in_proj_z: torch.nn.Module
    in_proj_b: torch.nn.Module
    in_proj_a: torch.nn.Module
    conv1d: torch.nn.Conv1d
    A_log: torch.nn.Parameter
    dt_bias: torch.nn.Parameter
    norm: torch.nn.Module
    out_proj: torch.nn.Module

    def forward(self, hidden_states: torch.Tensor, parts: StepParts, **_: Any) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden]; takes the arguments of transformers' layer, most of which mean nothing."""
        assert parts.delta is not None, "a step of a model with gated delta nets has a part for them"
        rows, delta = hidden_states[0], self.delta
        mixed_THX, gates, rates_THY, decays_THY = self._projected(rows)
        scale_HY = self.A_log.float().exp().view(-1, delta.values_per_key)
        bias_HY = self.dt_bias.float().view(-1, delta.values_per_key)
        decays_THY = -scale_HY * F.softplus(decays_THY.float() + bias_HY)
        mixed_THX = self._convolved(mixed_THX, parts.delta)
        out_THYV = self._run(mixed_THX, rates_THY.sigmoid(), decays_THY, parts)
        out = self.norm(out_THYV.to(rows.dtype).reshape(-1, delta.value_dim), gates.reshape(-1, delta.value_dim))
        made: torch.Tensor = self.out_proj(out.view(len(rows), -1))
        return made[None]

    def _projected(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(What is mixed, [T, H, X]; the values' gates, [T, any, any]; their rates and decays, [T, H, Y])."""
        delta = self.delta
        if hasattr(self, "in_proj_qkvz"):
            made_TH = self.in_proj_qkvz(rows).unflatten(-1, (delta.num_key_heads, -1))
            mixed_THX, gates = made_TH.split([delta.mixed_size, delta.values_per_key * delta.value_dim], -1)
            rates_THY, decays_THY = self.in_proj_ba(rows).unflatten(-1, (delta.num_key_heads, -1)).chunk(2, -1)
            return mixed_THX, gates, rates_THY, decays_THY
        rates_THY, decays_THY = (
            made(rows).unflatten(-1, (delta.num_key_heads, -1)) for made in (self.in_proj_b, self.in_proj_a)
        )
        return self._by_head(self.in_proj_qkv(rows)), self.in_proj_z(rows), rates_THY, decays_THY

    def _by_head(self, channels: torch.Tensor) -> torch.Tensor:
        """[any, H * X], all queries, then all keys, then all values -> [any, H, X]."""
        heads = self.delta.num_key_heads
        kinds = channels.split([heads * size for size in self.delta.mixed], -1)
        return torch.cat([kind.unflatten(-1, (heads, -1)) for kind in kinds], -1)

    def _convolved(self, mixed_THX: torch.Tensor, part: DeltaPart) -> torch.Tensor:
        """Also keeps the last W - 1 rows of each sequence."""
        last_rows = part.shelf.last_rows[self.number]
        mixed_TC = mixed_THX.flatten(1)
        rows_EC = mixed_TC.new_zeros(part.num_wide, mixed_TC.shape[1], dtype=torch.float32)
        rows_EC.index_copy_(0, part.wide_T, mixed_TC.float())
        rows_EC.index_copy_(0, part.before, last_rows.index_select(0, part.begins_S).flatten(0, 2).float())
        kept = rows_EC.index_select(0, part.last).view(len(part.ends_S), *last_rows.shape[1:])
        last_rows.index_copy_(0, part.ends_S, kept.to(last_rows.dtype))
        taps_WC = self._by_head(self.conv1d.weight[:, 0].T.float()).flatten(1)
        conv_TC = causal_convolution(rows_EC, taps_WC, part.wide_T).to(mixed_TC.dtype)
        return conv_TC.view_as(mixed_THX)

    def _run(
        self, mixed_THX: torch.Tensor, rates_THY: torch.Tensor, decays_THY: torch.Tensor, parts: StepParts
    ) -> torch.Tensor:
        """Outputs [T, H, Y, V]; also keeps the states after each sequence."""
        part, num, delta = parts.delta, parts.num_responses, self.delta
        assert part is not None
        states = part.shelf.states[self.number]
        state_SHYBV = states.index_select(0, part.begins_S).unflatten(1, (delta.num_key_heads, -1))
        inputs, outs, finals = (mixed_THX, rates_THY, decays_THY), [], []
        if num:
            mixed, rates, decays = (rows[:num, None] for rows in inputs)
            out, final = gated_delta_rule(mixed, rates, decays, state_SHYBV[:num], (num,), delta.key_dim)
            outs.append(out.flatten(0, 1))
            finals.append(final)
        if part.counts:
            mixed, rates, decays = (
                rows.new_zeros(part.num_places, *rows.shape[1:])
                .index_copy_(0, part.places, rows[num:])
                .unflatten(0, (-1, part.chunk_rows))
                for rows in inputs
            )
            out, final = gated_delta_rule(mixed, rates, decays, state_SHYBV[num:], part.counts, delta.key_dim)
            outs.append(out.flatten(0, 1).index_select(0, part.places))
            finals.append(final)
        states.index_copy_(0, part.ends_S, torch.cat(finals).flatten(1, 2))
        return torch.cat(outs)


def use_delta_nets(model: PreTrainedModel, delta: DeltaNet) -> None:
    """Makes each of the model's gated delta nets a `DeltaNetLayer`, in place: its weights and their names stay."""
    for number, layer in enumerate(sorted(delta.layers)):
        module = model.model.layers[layer].linear_attn
        module.__class__ = DeltaNetLayer
        module.delta, module.number = delta, number
