"""Megatron's GPTModel for a Hugging Face architecture, reading micro-batches in the shared-prompt layout.

Shape legend: T fed tokens, R rows with a label, N response tokens, H hidden size, V vocabulary, D rotary dimension.
"""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.attention import DenseSharedPromptAttention, SharedPromptParams
from trainer.devices import Device
from trainer.hf_config import ModelShape
from trainer.logprobs import response_logprobs
from trainer.shared_prompt import MicroBatch


class SharedPromptGPT(GPTModel):
    """A GPTModel whose forward takes a micro-batch and returns log-probs of its response tokens only."""

    def __init__(self, config: TransformerConfig, shape: ModelShape) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=_layer_spec(shape),
            vocab_size=shape.vocab_size,
            # Only learned position embeddings have a length; rotary ones take any position.
            max_sequence_length=0,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            rope_scaling=shape.rope_factor is not None,
            rope_scaling_factor=shape.rope_factor or 1.0,
        )
        self.shape = shape

    def forward(self, micro_batch: MicroBatch, temperature: float) -> torch.Tensor:
        """Log-probs of the response tokens at `temperature`, float32 [N], in the order of the group's responses."""
        hidden_T1H = self.decoder(
            hidden_states=self.embedding(micro_batch.tokens_T[None], position_ids=micro_batch.positions_T[None]),
            attention_mask=None,
            rotary_pos_emb=self._rotary_angles(micro_batch.positions_T),
            packed_seq_params=SharedPromptParams(segments=micro_batch.segments),
        )
        weight_VH = self.shared_embedding_or_output_weight() if self.shape.tied else None
        logits_R1V, _ = self.output_layer(hidden_T1H[micro_batch.first_label_row :], weight=weight_VH)
        return response_logprobs(logits_R1V[:, 0], micro_batch.label_rows_N, micro_batch.labels_N, temperature)

    def _rotary_angles(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Angles by position id, float32 [T, 1, 1, D]; Megatron's own forward would number the rows 0 .. T - 1."""
        angles = torch.outer(positions_T.float(), self.rotary_pos_emb.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def build_model(shape: ModelShape, dtype: torch.dtype, device: Device) -> SharedPromptGPT:
    """A model of this shape on this rank with undefined weights, in `dtype` throughout."""
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        cuda_graph_scope=[],
        # Keeps Megatron's DDP from averaging: gradients stay plain sums until the batch's count is known.
        calculate_per_token_loss=True,
        **device.MODEL_OPTIONS,
    )
    return SharedPromptGPT(config, shape).to(device=device.DEVICE, dtype=dtype)


def _layer_spec(shape: ModelShape) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = DenseSharedPromptAttention
    return spec
