"""Classes of a model's tensors, by their Hugging Face names: what the canary and `async-rl audit` tell apart."""

import re

HEAD, EMBEDDING, ROUTER, EXPERT = "head", "embedding", "router", "expert "
EXPERTS = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(?:(\d+)\.)?(.+)")
"""Within a layer: the number of one expert, if the tensor is not that of all, and the name within it."""
CLASS_OF = {
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.q_proj.bias": "q bias",
    "self_attn.k_proj.bias": "k bias",
    "self_attn.q_norm.weight": "q norm",
    "self_attn.k_norm.weight": "k norm",
    "self_attn.sinks": "sinks",
    "self_attn.q_a_proj.weight": "q latent",
    "self_attn.q_a_layernorm.weight": "q latent norm",
    "self_attn.q_b_proj.weight": "q of latents",
    "self_attn.kv_a_proj_with_mqa.weight": "kv latent",
    "self_attn.kv_a_layernorm.weight": "kv latent norm",
    "self_attn.kv_b_proj.weight": "kv of latents",
    "self_attn.v_proj.weight": "v",
    "self_attn.v_proj.bias": "v bias",
    "linear_attn.in_proj_qkvz.weight": "delta qkv and gate",
    "linear_attn.in_proj_ba.weight": "delta rate and decay",
    "linear_attn.in_proj_qkv.weight": "delta qkv",
    "linear_attn.in_proj_z.weight": "delta gate",
    "linear_attn.in_proj_b.weight": "delta rate",
    "linear_attn.in_proj_a.weight": "delta decay",
    "linear_attn.conv1d.weight": "delta convolution",
    "linear_attn.dt_bias": "delta decay bias",
    "linear_attn.A_log": "delta decay scale",
    "linear_attn.norm.weight": "delta norm",
    "input_layernorm.weight": "input norm",
    "post_attention_layernorm.weight": "post-attention norm",
    "pre_feedforward_layernorm.weight": "pre-feed-forward norm",
    "post_feedforward_layernorm.weight": "post-feed-forward norm",
    "self_attn.o_proj.weight": "o",
    "self_attn.o_proj.bias": "o bias",
    "linear_attn.out_proj.weight": "delta o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.gate_up_proj_bias": "gate and up bias",
    "mlp.gate_up_proj": "gate and up",
    "mlp.down_proj.weight": "down",
    "mlp.shared_experts.gate_proj.weight": "shared gate",
    "mlp.shared_experts.up_proj.weight": "shared up",
    "mlp.shared_experts.down_proj.weight": "shared down",
    "mlp.shared_expert.gate_proj.weight": "shared gate",
    "mlp.shared_expert.up_proj.weight": "shared up",
    "mlp.shared_expert.down_proj.weight": "shared down",
    "mlp.shared_expert_gate.weight": "gate of shared",
    "mlp.gate_proj.bias": "gate bias",
    "mlp.up_proj.bias": "up bias",
    "mlp.down_proj.bias": "down bias",
    "mlp.down_proj": "down",
    "mlp.down_proj_bias": "down bias",
    "mlp.router.bias": "router bias",
    "mlp.w1.weight": "gate",
    "mlp.w3.weight": "up",
    "mlp.w2.weight": "down",
    "mlp.gate.weight": ROUTER,
    "block_sparse_moe.gate.weight": ROUTER,
    "mlp.router.weight": ROUTER,
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "final norm",
    "lm_head.weight": HEAD,
}
"""Class of a tensor by the end of its Hugging Face name; classes of experts are prefixed with `EXPERT`.

In the order of `SenderFacts.classes`: a constant o hides attention, and with it a norm of its output, so it comes after
all of that; constant gates may reach their limit, which hides their bias; a constant embedding makes all positions
alike, which hides attention too; a constant head hides everything.
"""


def class_of(hf_name: str) -> str:
    """The class of a tensor."""
    if hf_name in CLASS_OF:
        return CLASS_OF[hf_name]
    within_layer = hf_name.split(".", 3)[3]
    if of_expert := EXPERTS.fullmatch(within_layer):
        return EXPERT + CLASS_OF[f"mlp.{of_expert[2]}"]
    return CLASS_OF[within_layer]
