"""Megatron's GPTModel for a Hugging Face architecture, reading micro-batches in the shared-prompt layout.

Shape legend: T fed rows, R rows with logits, N response tokens, H hidden size, V vocabulary, D rotary dimension.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from async_rl.config.trainer_section import TrainerSection
from async_rl.shared.model_families import OUT_GATE, QKV_BIAS, SINKS
from async_rl.shared.model_parts import Rope
from async_rl.shared.model_shape import ModelShape, stage_layers
from trainer.attention.core_attention import Rotation, SharedPromptAttention, SharedPromptParams
from trainer.attention.delta_net import GatedDeltaNet
from trainer.attention.delta_plan import DeltaPlan, make_delta_plan
from trainer.attention.gated_attention import GatedAttention
from trainer.attention.latent_attention import LatentAttention
from trainer.attention.prompt_cache import PromptCache
from trainer.attention.segments import Segments
from trainer.attention.shared_attention import checked_kernel
from trainer.batching.shared_prompt import Labels, MicroBatch, Rows
from trainer.devices.layer_ops import LayerOps
from trainer.model.experts import (
    keep_biases_wide,
    keep_routes,
    keep_rows_local,
    moe_options,
    use_router,
    use_stacked_experts,
)
from trainer.model.layer_spec import (
    RMSNorm,
    activation_options,
    norm_spec,
    scaled_add,
    use_activation,
    use_biases,
    use_linear,
    use_norms,
)
from trainer.model.logprobs import Scores, of_all_labels, response_logprobs
from trainer.parallel import Parallel

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # The feed-forward part saves the most activations per row, flash attention few.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
"""How chunks are connected. Two stages send each other activations and gradients at once, which Megatron keeps apart
only where it sends one by one."""


class SharedPromptGPT(GPTModel):
    """This rank's part of a GPTModel whose forward takes a micro-batch and returns log-probs of its response tokens."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, parallel: Parallel, chunk: int = 0) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(config, shape, parallel, chunk),
            vocab_size=shape.vocab_size,
            # Only learned position embeddings have a length; rotary ones accept any position.
            max_sequence_length=0,
            pre_process=parallel.is_first_stage and chunk == 0,
            post_process=parallel.is_last_stage and chunk == parallel.num_chunks - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            vp_stage=chunk if parallel.num_chunks > 1 else None,
        )
        self._embedding_multiplier = 1.0
        if (multipliers := shape.multipliers) is not None:
            dtype = config.params_dtype if multipliers.is_rounded else torch.float64
            self._embedding_multiplier = torch.tensor(multipliers.embedding, dtype=dtype, device="cpu").item()
        self._angle_scale = 1.0
        if shape.rope is not None or shape.rotary_dim != shape.head_dim:
            frequencies, self._angle_scale = scaled_frequencies(shape.rope, shape.rope_theta, shape.rotary_dim)
            self.rotary_pos_emb.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        self._local_frequencies: tuple[torch.Tensor, float] | None = None
        """Of layers with a window, where they are others."""
        if shape.local_rope is not None:
            theta, rope = shape.local_rope
            frequencies, scale = scaled_frequencies(rope, theta, shape.rotary_dim)
            self._local_frequencies = frequencies.to(self.rotary_pos_emb.inv_freq.device), scale
        keep_rows_local(self)
        keep_routes(self)
        self.shape = shape
        self.parallel = parallel
        self.row_sharers = parallel_state.get_context_parallel_group() if parallel.cp_size > 1 else None
        """The context-parallel ranks, which have other rows of the same micro-batches; None for one."""
        self.other_head: torch.Tensor | None = None
        """Replaces a tied head while it is set; of the same shape."""
        self.replays = False
        """Whether experts are those of `Rows.routes_TW`, where rows have them."""
        self._ops = parallel.device.LAYER_OPS
        self.kernel = checked_kernel(
            parallel.device,
            config.params_dtype,
            shape.num_heads // (parallel.tp_size * parallel.cp_size),
            max(1, shape.num_kv_heads // (parallel.tp_size * parallel.cp_size)),
            shape.kernel_dim,
            shape.window is not None,
            shape.has(SINKS),
        )

    @property
    def chunks(self) -> Sequence["SharedPromptGPT"]:
        """What Megatron's schedule runs on this rank."""
        return [self]

    def forward(self, micro_batch: MicroBatch, temperature: float, with_entropy: bool = True) -> torch.Tensor | Scores:
        """Log-probs and entropies of the response tokens (see `scores`); hidden rows on earlier stages."""
        hidden_T1H = self.hidden(micro_batch.rows)
        if not self.post_process:
            return hidden_T1H
        return self.scores(self.rows_for_logits(hidden_T1H), micro_batch.labels, temperature, with_entropy)

    def hidden(self, rows: Rows, cache: PromptCache | None = None) -> torch.Tensor:
        """This stage's output, [T, 1, H]; with sequence parallelism this rank's share of `rows`.

        A stage other than the first takes its input from `set_input_tensor`, which Megatron's pipeline calls.
        """
        hidden_T1H = None
        if self.pre_process:
            hidden_T1H = self.embedding(rows.tokens_T[None], position_ids=rows.positions_T[None])
            if self.shape.multipliers is not None:
                hidden_T1H = hidden_T1H * self._embedding_multiplier
            if torch.is_grad_enabled() and not hidden_T1H.requires_grad:
                # Below adapters: what is computed again gets a gradient only if its input has one.
                hidden_T1H.requires_grad_()
        rotation = self._rotation(rows.positions_T, self.rotary_pos_emb.inv_freq, self._angle_scale)
        local = self._local_frequencies
        params = SharedPromptParams(
            segments=rows.segments,
            rotation=rotation,
            local_rotation=rotation if local is None else self._rotation(rows.positions_T, *local),
            ops=self._ops,
            kernel=self.kernel,
            cache=cache,
            query_scale_T11=self._query_scale(rows.positions_T),
            cp_group=self.row_sharers,
            delta_plan=self._delta_plan(rows.segments, cache),
            routes_TW=rows.routes_TW if self.replays else None,
        )
        out_T1H: torch.Tensor = self.decoder(
            hidden_states=hidden_T1H, attention_mask=None, rotary_pos_emb=None, packed_seq_params=params
        )
        return out_T1H

    def rows_for_logits(self, hidden_T1H: torch.Tensor) -> torch.Tensor:
        """The last stage's hidden rows as the vocabulary-parallel output layer takes them, [T, H].

        Each rank's gradient covers its own part of the vocabulary; the backward pass of this operation sums over ranks.
        """
        rows_T1H: torch.Tensor = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=True)
        return rows_T1H[:, 0]

    def scores(self, rows_TH: torch.Tensor, labels: Labels, temperature: float, with_entropy: bool = True) -> Scores:
        """See `response_logprobs`."""
        weight_VH = self.shared_embedding_or_output_weight() if self.shape.tied else self.output_layer.weight
        if self.other_head is not None:
            weight_VH = self.other_head
        hidden_RH = rows_TH.index_select(0, labels.logit_rows_R)
        of_own = response_logprobs(
            hidden_RH,
            weight_VH,
            labels.label_rows_N,
            labels.labels_N,
            temperature,
            with_entropy,
            self._ops,
            labels.judged,
            self.shape.multipliers.logits if self.shape.multipliers else 1.0,
        )
        return of_all_labels(of_own, labels, self.row_sharers)

    def _delta_plan(self, segments: Segments, cache: PromptCache | None) -> DeltaPlan | None:
        if self.shape.delta is None:
            return None
        # The key rows of the second stage begin with those of the first.
        is_prompt = cache is not None and segments.self_kv_start == 0
        return make_delta_plan(segments, self.shape.delta.conv_width, keeps_prompt=is_prompt)

    def _query_scale(self, positions_T: torch.Tensor) -> torch.Tensor | None:
        """What the queries of each position are multiplied by, [T, 1, 1], in the model's dtype."""
        if self.shape.query_scaling is None:
            return None
        beta, length = self.shape.query_scaling
        scale_T = 1 + beta * torch.log(1 + torch.floor(positions_T / length))
        return scale_T.to(self.config.params_dtype)[:, None, None]

    def _rotation(self, positions_T: torch.Tensor, frequencies: torch.Tensor, scale: float) -> Rotation:
        """Of each position, [T, 1, D], in the model's dtype; cosine and sine are multiplied by `scale`."""
        angles = torch.outer(positions_T.float(), frequencies)
        angles_T1D = torch.cat((angles, angles), dim=-1)[:, None]
        dtype = self.config.params_dtype
        return Rotation((angles_T1D.cos() * scale).to(dtype), (angles_T1D.sin() * scale).to(dtype))


class InterleavedGPT(MegatronModule):
    """This rank's part of a model whose pipeline stages are interleaved: several chunks, which are not neighbours.

    Its parameters are those of `chunks.0`, `chunks.1` and so on. Each chunk runs by itself, in Megatron's schedule.
    """

    def __init__(self, config: TransformerConfig, chunks: Sequence[SharedPromptGPT]) -> None:
        super().__init__(config=config)
        self.shape = chunks[0].shape
        self.parallel = chunks[0].parallel
        self.chunks = cast("Sequence[SharedPromptGPT]", torch.nn.ModuleList(chunks))

    @property
    def module(self) -> SharedPromptGPT:
        """The chunk in which Megatron looks for the weight of a tied head: the last rank has its copy in the last."""
        return self.chunks[-1 if self.parallel.is_last_stage else 0]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """That of all chunks; what is saved has the names of a whole model."""
        return {
            f"chunks.{number}.{name}": entry
            for number, chunk in enumerate(self.chunks)
            for name, entry in chunk.sharded_state_dict(prefix, sharded_offsets, metadata).items()
        }


RankModel = SharedPromptGPT | InterleavedGPT
"""One rank's part of a model."""


def scaled_frequencies(rope: Rope | None, theta: float, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angles per position, float32 [D / 2], and the factor of cosine and sine, as transformers computes them."""
    if rope is None:
        return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0
    # Loads transformers' generation, and with it torch's compiler: half a second or more, which most models need not.
    from transformers import LlamaConfig

    parameters = {"rope_type": rope.kind, "rope_theta": theta, **dict(rope.parameters)}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](config)
    return frequencies, scale


def build_model(
    shape: ModelShape,
    dtype: torch.dtype,
    parallel: Parallel,
    section: TrainerSection,
    kind: type[SharedPromptGPT] = SharedPromptGPT,
) -> RankModel:
    """This rank's part of a model of this shape with undefined weights, in `dtype` throughout."""
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm_heads is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.has(QKV_BIAS),
        attention_output_gate=shape.has(OUT_GATE),
        softmax_scale=shape.attention_scale,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        cuda_graph_scope=[],
        tensor_model_parallel_size=parallel.tp_size,
        context_parallel_size=parallel.cp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        virtual_pipeline_model_parallel_size=parallel.num_chunks if parallel.num_chunks > 1 else None,
        pipeline_model_parallel_layout=_pipeline_layout(shape.num_layers, parallel),
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.tp_size > 1,
        # Micro-batches have any number of rows (see `pipeline_shapes.py`).
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Keeps Megatron's DDP from averaging: gradients stay plain sums until the batch's count is known.
        calculate_per_token_loss=True,
        **INTERLEAVED if parallel.num_chunks > 1 else {},
        **RECOMPUTE[section.recompute] | moe_options(shape.experts, section.recompute),
        **parallel.device.MODEL_OPTIONS | activation_options(shape, parallel.device.LAYER_OPS),
    )
    chunks = [kind(config, shape, parallel, chunk) for chunk in range(parallel.num_chunks)]
    model = chunks[0] if len(chunks) == 1 else InterleavedGPT(config, chunks)
    model.to(device=parallel.device.DEVICE, dtype=dtype)
    keep_biases_wide(model)
    _mark_divided(model)
    use_linear(model, parallel.device.LAYER_OPS)
    return model


def _pipeline_layout(num_layers: int, parallel: Parallel) -> str | None:
    """The layers of each stage or chunk as Megatron takes them, which divides evenly without."""
    num_parts = parallel.pp_size * parallel.num_chunks
    if num_layers % num_parts == 0:
        return None
    return "E" + "|".join("t" * len(layers) for layers in stage_layers(num_layers, num_parts)) + "L"


def _mark_divided(model: RankModel) -> None:
    """Marks for Megatron's gradient norm which weights differ between tensor-parallel ranks.

    Megatron sets the mark when it initializes weights, which is disabled here.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding | ColumnParallelLinear | RowParallelLinear):
            by_columns = isinstance(module, RowParallelLinear)
            for name, parameter in module.named_parameters(recurse=False):
                # A tied output layer shares the embedding's weight, and has no parameter of its own. The bias of what
                # is divided by columns is whole on each rank.
                if not hasattr(parameter, "tensor_model_parallel") and not (by_columns and name == "bias"):
                    set_tensor_model_parallel_attributes(parameter, True, int(by_columns), 1)


def _block_spec(
    config: TransformerConfig, shape: ModelShape, parallel: Parallel, chunk: int
) -> TransformerBlockSubmodules:
    """A chunk's layers; those of one kind share a spec."""
    ops = parallel.device.LAYER_OPS
    stages = stage_layers(shape.num_layers, parallel.pp_size * parallel.num_chunks)
    layers = stages[chunk * parallel.pp_size + parallel.pp_rank]
    kinds = [(shape.has_experts(layer), shape.has_delta(layer)) for layer in layers]
    specs = {kind: _layer_spec(config, shape, ops, *kind) for kind in dict.fromkeys(kinds)}
    return TransformerBlockSubmodules([specs[kind] for kind in kinds], norm_spec(ops, shape))


def _layer_spec(
    config: TransformerConfig, shape: ModelShape, ops: LayerOps, has_experts: bool, has_delta: bool
) -> ModuleSpec:
    experts = shape.experts if has_experts else None
    layer = get_gpt_layer_local_spec(
        num_experts=experts and experts.num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    if experts is not None:
        use_router(layer, experts)
        use_stacked_experts(layer, ops, experts)
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=SharedPromptAttention, params={"shape": shape}
    )
    use_norms(layer, config, shape, ops)
    use_activation(layer, shape, ops)
    use_biases(layer, shape)
    if shape.multipliers is not None and shape.multipliers.residual != 1:
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = scaled_add(shape.multipliers.residual)
    if shape.has(OUT_GATE):
        layer.submodules.self_attention.module = GatedAttention
    norm = partial(RMSNorm, op=ops.rms_norm)
    if shape.latents is not None:
        options: dict[str, Any] = {"latents": shape.latents, "norm": norm}
        layer.submodules.self_attention = ModuleSpec(module=LatentAttention, params=options)
    if has_delta:
        layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"delta": shape.delta, "norm": norm})
    return layer
