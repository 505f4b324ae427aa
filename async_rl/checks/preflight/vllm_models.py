"""What of a config.json vLLM computes otherwise than the trainer: constants of its models, keys that it leaves out, and
keys that only it reads. By vLLM's sources, release 0.32 (vllm/model_executor/models); the embedded engine is
transformers, whose models the trainer's are.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from async_rl.checks.preflight.model import ModelFiles
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.layer_windows import window_of
from async_rl.shared.model_families import QUERY_BETA, TABLE
from async_rl.shared.model_limits import is_mxfp4, rope_of, rope_type
from async_rl.shared.model_shape import ModelShape

Held = Mapping[str, tuple[object, ...]]
"""Keys of config.json: what a key means to vLLM that is left out, then the other values that vLLM computes as
transformers does. Where the first is `MISSING`, the key must not be left out."""

MISSING: Final = "left out"

_NO_BIAS: Final[Held] = {"attention_bias": (False,)}
_UNTIED: Final[Held] = {"tie_word_embeddings": (False,)}
_SILU: Final[Held] = {"hidden_act": ("silu",)}
_QWEN: Final[Held] = {"dual_chunk_attention_config": (None,), **_SILU}
_LLAMA: Final[Held] = {"bias": (False,), "qkv_bias": (None,), "logit_scale": (1.0,), **_SILU}
_MISTRAL: Final[Held] = {**_LLAMA, "llama_4_scaling": (None,), "ada_rms_norm_t_cond": (False,)}
_DELTA: Final[Held] = {
    **_QWEN,
    **_NO_BIAS,
    "qkv_bias": (False,),
    "output_gate_type": ("silu", "swish"),
}
_QWEN3_5: Final[Held] = {**_DELTA, "layer_scale": (False,)}
_BY_TRANSFORMERS: Final[Held] = {"attn_logit_softcapping": (None,)}
"""Of families that vLLM computes with transformers' own layers, but for attention."""

VLLM: Final[Mapping[str, Held]] = {
    "qwen3": {**_QWEN, **_NO_BIAS},
    "qwen3_moe": {**_QWEN, **_NO_BIAS, "shared_expert_intermediate_size": (0,)},
    "qwen2": {**_QWEN, "qk_norm": (False,)},
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _BY_TRANSFORMERS,
    "ministral3": _MISTRAL,
    "smollm3": _BY_TRANSFORMERS,
    "seed_oss": _BY_TRANSFORMERS,
    "granite": {
        **_SILU,
        "bias": (False,),
        "logit_scale": (1.0,),
        "layer_types": (None,),
        "layer_rope_theta": (None,),
        "attention_sinks": (False,),
    },
    "olmo2": _BY_TRANSFORMERS,
    "olmo3": _BY_TRANSFORMERS,
    "gemma3_text": {},
    "gpt_oss": {
        **_UNTIED,
        "attention_bias": (True,),
        "rms_norm_eps": (1e-5,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    "deepseek_v3": {
        **_SILU,
        **_UNTIED,
        "scoring_func": (MISSING, "sigmoid"),
        "topk_method": (MISSING, "noaux_tc"),
        "rope_interleave": (True,),
        "rms_norm_eps": (1e-6,),
        "index_topk": (None,),
    },
    "glm4_moe": {**_SILU, **_UNTIED},
    "minimax_m2": {**_UNTIED, "scoring_func": (MISSING, "sigmoid"), "use_routing_bias": (MISSING, True)},
    "qwen3_next": {**_DELTA, **_UNTIED},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {**_QWEN3_5, "norm_topk_prob": (True,)},
}
"""By family."""


def require_vllm(config: Config, files: ModelFiles) -> None:
    """Checks that vLLM computes what the trainer does, if the run starts instances of it.

    Raises:
        ConfigError: it does not; names the keys of config.json.
    """
    if config.inference.engine != "vllm" or config.pool.instances:
        # Instances that run elsewhere may have another checkpoint, or another engine.
        return
    if is_mxfp4(files.config):
        raise ConfigError(
            f"{files.named} is in mxfp4 (quantization_config of its config.json), which inference.engine = 'vllm' does "
            "not serve with the trainer's weights: save it in bfloat16 with transformers, AutoModelForCausalLM."
            "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(...)"
        )
    faults = [
        f"{files.named} {found} in its config.json, which inference.engine = 'vllm' does not compute as the trainer "
        f"does: expected {expected}, or inference.engine = 'transformers'"
        for found, expected in unlike_in_vllm(files, config.max_model_len)
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def unlike_in_vllm(files: ModelFiles, num_positions: int | None) -> Iterator[tuple[str, str]]:
    """What vLLM computes otherwise: how it is written in config.json, and what would be expected.

    Args:
        num_positions: of the longest sequence; None for as many as the model has.
    """
    config, shape = files.config, files.shape
    for key, (left_out, *others) in VLLM[shape.family].items():
        if config.get(key, left_out) not in (left_out, *others):
            yield f"has {key} = {config[key]!r}", " or ".join(map(repr, others if left_out is MISSING else [left_out]))
        elif left_out is MISSING and key not in config:
            yield f"has no {key}", repr(others[0])
    yield from _of_names(config, shape)
    yield from _of_windows(config, shape)
    yield from _of_rope(config, shape)
    longest = num_positions or files.max_positions
    if shape.query_scaling and (longest is None or longest > shape.query_scaling[1]):
        yield f"has {QUERY_BETA}, which scales queries", f"no more than {shape.query_scaling[1]:.0f} tokens a sequence"


def _of_names(config: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, str]]:
    names, own = config.get("architectures"), shape.family.removesuffix("_text")
    if not isinstance(names, list | None):
        yield f"has architectures = {names!r}", "a list"
    elif names and f"{own.replace('_', '')}forcausallm" not in [str(name).replace("_", "").lower() for name in names]:
        yield f"has architectures = {names!r}", f"that of its model_type {shape.family!r}"
    if shape.family == "qwen2" and shape.head_dim * shape.num_heads != shape.hidden_size:
        yield f"has head_dim = {shape.head_dim}", f"its hidden_size divided by its {shape.num_heads} heads"
    if shape.family == "minimax_m2" and "rotary_dim" not in config:
        yield "has no rotary_dim", f"{shape.rotary_dim}"


def _of_windows(config: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, str]]:
    windows, layers = TABLE[shape.family].windows, range(1, shape.num_layers + 1)
    if windows is None:
        # A key of no meaning to transformers, but to vLLM where no kinds of layers are listed.
        if config.get("sliding_window") and "layer_types" not in config and shape.delta is None:
            yield f"has sliding_window = {config['sliding_window']!r}", "none"
        return
    if window_of(config, windows) is None:
        return
    windowed = shape.windowed_layers
    if shape.family == "gpt_oss" and windowed not in (frozenset(layers), frozenset(layers[::2])):
        yield f"has layer_types = {config.get('layer_types')!r}", "a window in every other layer, from the first on"
    if windows.default == "last" and 0 < len(windowed) < shape.num_layers:
        some = f"has windows in {len(windowed)} of its layers (layer_types, max_window_layers)"
        yield some, "windows in all, or none"
    if not windows.by_layer and config.get("layer_types") is not None:
        yield "has layer_types", "none, beside a sliding_window"


def _of_rope(config: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, str]]:
    if shape.family not in ("gpt_oss", "deepseek_v3"):
        return
    name, rope = rope_of(config, TABLE[shape.family])
    given = {key for key, value in rope.items() if value is not None}
    if shape.family == "gpt_oss":
        if rope_type(rope) != "yarn":
            yield f"has rope_type {rope_type(rope)!r} in {name}", "'yarn'"
        needed, left_out = {"beta_fast", "beta_slow"}, {"attention_factor", "mscale", "mscale_all_dim"}
    elif rope_type(rope) == "default":
        return
    else:
        if rope_type(rope) != "yarn":
            yield f"has rope_type {rope_type(rope)!r} in {name}", "'yarn' or 'default'"
        # Its factor of angles is a quotient of both, of which transformers takes none where one is missing.
        both = {"mscale", "mscale_all_dim"}
        needed, left_out = both if given & both else set(), {"attention_factor"}
        if rope.get("truncate") is False:
            yield f"has truncate False in {name}", "True"
    for key in sorted(needed - given):
        yield f"has no {key} in {name}", "a number"
    for key in sorted(left_out & given):
        yield f"has {key} = {rope[key]!r} in {name}", "none"
