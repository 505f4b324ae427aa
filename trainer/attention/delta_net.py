"""A gated delta net layer (arXiv 2412.06464) as Qwen3-Next has it, in the shared-prompt layout: `trainer/model/gpt.py`
sets it.

Megatron's own (0.16.1) needs an extension for CUDA, and takes neither packed rows nor a state to begin with. Here a
prompt runs once: all of its responses begin with its final state, and with its last rows before the convolution.
Tensor-parallel ranks divide the key heads, with the value heads of each.

Shape legend: T fed rows, S this rank's share of them, H key heads of this rank, R value heads of each, K and V
dimensions of a key and a value head, X = 2 K + R V, W width of the convolution, P prompts, L places of rows in chunks;
1 is Megatron's batch dimension.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch.utils.checkpoint import checkpoint

from async_rl.shared.delta_rule import Chunks, causal_convolution, gated_delta_rule
from async_rl.shared.model_parts import DeltaNet
from trainer.attention.core_attention import SharedPromptParams
from trainer.attention.delta_plan import DeltaPlan
from trainer.attention.latent_attention import Norm

STATES, LAST_ROWS = "states", "last rows"


class GatedDeltaNet(MegatronModule):
    """[S, 1, H] -> [S, 1, H]; takes the arguments of Megatron's attention layers, most of which mean nothing here.

    Per key head the input projection has its query, its key, its R values, their gates, their rates, and their decays.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *, delta: DeltaNet, norm: Norm, **_: Any) -> None:
        super().__init__(config=config)
        self._delta, self._layer_number = delta, layer_number
        hidden, heads = config.hidden_size, delta.num_key_heads
        self.linear_in = ColumnParallelLinear(
            hidden,
            heads * sum(delta.projected),
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        own_heads = heads // config.tensor_model_parallel_size
        self.conv_weight = self._divided(own_heads * delta.mixed_size, 1, delta.conv_width)
        self.decay_log = self._divided(own_heads * delta.values_per_key)
        self.decay_bias = self._divided(own_heads * delta.values_per_key)
        self.out_norm = norm(config, delta.value_dim, config.layernorm_epsilon)
        self.linear_out = RowParallelLinear(
            delta.num_value_heads * delta.value_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(
        self, hidden_S1H: torch.Tensor, attention_mask: None, *, packed_seq_params: SharedPromptParams, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """(Output; no bias)."""
        delta, plan = self._delta, packed_seq_params.delta_plan
        assert plan is not None, "a model with delta nets makes a plan of every micro-batch"
        made_THX = self.linear_in(hidden_S1H)[0][:, 0].unflatten(-1, (-1, sum(delta.projected)))
        mixed_THX, gates_TH, rates_THR, decays_THR = made_THX.split(
            [delta.mixed_size, delta.values_per_key * delta.value_dim, delta.values_per_key, delta.values_per_key], -1
        )
        wide = torch.promote_types(hidden_S1H.dtype, torch.float32)
        scale_HR = self.decay_log.to(wide).exp().view(-1, delta.values_per_key)
        bias_HR = self.decay_bias.to(wide).view(-1, delta.values_per_key)
        decays_THR = -scale_HR * F.softplus(decays_THR.to(wide) + bias_HR)
        last_P, mixed_THX = self._convolved(mixed_THX, packed_seq_params, plan)
        states_PHRKV, out_THRV = self._run(mixed_THX, rates_THR.sigmoid(), decays_THR, packed_seq_params, plan)
        out_THRV = self.out_norm(out_THRV.to(hidden_S1H.dtype))
        gates_THRV = gates_TH.unflatten(-1, (delta.values_per_key, -1))
        out_THRV = (out_THRV * F.silu(gates_THRV.to(wide))).to(hidden_S1H.dtype)
        if packed_seq_params.cache is not None and plan.num_prompts:
            for name, kept in ((STATES, states_PHRKV), (LAST_ROWS, last_P)):
                out_THRV = packed_seq_params.cache.keep(self._layer_number, name, kept, out_THRV)
        out_S1H: torch.Tensor = self.linear_out(out_THRV.flatten(1)[:, None])[0]
        return out_S1H, None

    def _convolved(
        self, mixed_THX: torch.Tensor, params: SharedPromptParams, plan: DeltaPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(The prompts' last W - 1 rows, [P * (W - 1), H * X], zeros where one is shorter; silu of the causal
        convolution over W rows, channel by channel, rounded once)."""
        mixed_TX, reach = mixed_THX.flatten(1), plan.width - 1
        wide = torch.promote_types(mixed_TX.dtype, torch.float32)
        last_P = mixed_TX.new_zeros(plan.num_prompts * reach, mixed_TX.shape[1])
        last_P = last_P.index_copy(0, plan.last_P, mixed_TX.index_select(0, plan.last))
        rows_EX = mixed_TX.new_zeros(plan.num_wide, mixed_TX.shape[1], dtype=wide)
        rows_EX = rows_EX.index_copy(0, plan.wide_T, mixed_TX.to(wide))
        if len(plan.before):
            before = last_P if plan.num_prompts else params.kept(self._layer_number, LAST_ROWS)
            rows_EX = rows_EX.index_copy(0, plan.before_E, before.index_select(0, plan.before).to(wide))
        conv_TX = causal_convolution(rows_EX, self.conv_weight[:, 0].T.to(wide), plan.wide_T).to(mixed_TX.dtype)
        return last_P, conv_TX.unflatten(-1, mixed_THX.shape[1:])

    def _run(
        self,
        mixed_THX: torch.Tensor,
        rates_THR: torch.Tensor,
        decays_THR: torch.Tensor,
        params: SharedPromptParams,
        plan: DeltaPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(Final states of the prompts, [P, H, R, K, V]; outputs [T, H, R, V]), float32 or wider."""
        delta = self._delta
        num_places = [level.num_places for level in (plan.prompts, plan.responses)]
        of_levels = [
            rows.new_zeros(sum(num_places), *rows.shape[1:]).index_copy(0, plan.places_T, rows).split(num_places)
            for rows in (mixed_THX, rates_THR, decays_THR)
        ]
        of_prompts, of_responses = zip(*of_levels, strict=True)
        empty = (*decays_THR.shape[1:], delta.key_dim, delta.value_dim)
        outs = []
        states_PHRKV = decays_THR.new_zeros(0, *empty)
        if plan.prompts.counts:
            state = decays_THR.new_zeros(plan.prompts.counts[0], *empty)
            out, finals = self._level(of_prompts, state, plan.prompts, plan.chunk_rows)
            outs.append(out)
            states_PHRKV = finals.index_select(0, plan.finals_P)
        if plan.responses.counts:
            starts = states_PHRKV if plan.num_prompts else params.kept(self._layer_number, STATES)
            state = starts.index_select(0, plan.prompt_of_S)
            outs.append(self._level(of_responses, state, plan.responses, plan.chunk_rows)[0])
        return states_PHRKV, torch.cat(outs).index_select(0, plan.places_T)

    def _level(
        self, rows: tuple[torch.Tensor, ...], state: torch.Tensor, level: Chunks, chunk_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(Outputs [L, H, R, V], final states). What the rule computes is several times its input: it is computed again
        in the backward pass."""
        rule = partial(gated_delta_rule, counts=level.counts, key_dim=self._delta.key_dim)
        chunks = [each.unflatten(0, (-1, chunk_rows)) for each in rows]
        out, finals = checkpoint(rule, *chunks, state, use_reentrant=False, preserve_rng_state=False)
        return out.flatten(0, 1), finals

    def _divided(self, *shape: int) -> torch.nn.Parameter:
        """A parameter of which each tensor-parallel rank has the rows of its heads."""
        parameter = torch.nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> ShardedStateDict:
        """Its own parameters are divided along dimension 0."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded
