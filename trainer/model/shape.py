"""The model in a Hugging Face checkpoint's config, as a `ModelShape`; refuses what the trainer cannot train."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, PreTrainedConfig

from async_rl.errors import ConfigError
from async_rl.net.hub import hub_fault
from async_rl.preflight.model import FAMILIES
from async_rl.preflight.model_features import not_held

CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "additional_chat_templates/*.jinja")


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of every layer's feed-forward part: `num_experts` of them, each token uses the `top_k` best.

    `renormalized` means that a token's `top_k` weights sum to 1; otherwise they are the softmax over all experts.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    renormalized: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and features of one decoder-only model.

    `rope_factor` is the llama3 scaling factor, or None for plain rotary embeddings. `tied` means that the output layer
    uses the embedding's weights. `experts` replace, in every layer, one feed-forward part of `ffn_size`. With
    `gives_values` the output layer is a critic's head, which no checkpoint's config says.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    tied: bool
    experts: Experts | None = None
    gives_values: bool = False

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")


def find_checkpoint(path: str) -> Path:
    """The directory of the checkpoint called `path`: a local directory, or a hub name, downloaded once into HF's cache.

    Raises:
        ConfigError: `path` is neither.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if Path(path).exists():
        raise ConfigError(f"model.path {path!r} has no config.json: give a Hugging Face checkpoint directory")
    fault = hub_fault()
    try:
        return Path(snapshot_download(path, allow_patterns=list(CHECKPOINT_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model.path {path!r} is neither a directory nor a model that can be fetched from the hub: {fault or error}"
        ) from error


def read_model_shape(checkpoint: Path) -> ModelShape:
    """Reads `config.json` of a checkpoint directory.

    Raises:
        ConfigError: an architecture or feature that the trainer does not support; the message names it.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot read the model config in {str(checkpoint)!r}: {error}") from error
    if config.model_type not in FAMILIES:
        raise _unsupported(checkpoint, f"model_type {config.model_type!r}", f"one of {', '.join(FAMILIES)}")
    for found, expected in not_held(config.to_dict()):
        raise _unsupported(checkpoint, found, expected)
    rope = config.rope_parameters
    return ModelShape(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_factor=float(rope["factor"]) if rope.get("rope_type") == "llama3" else None,
        tied=config.tie_word_embeddings,
        experts=_read_experts(config) if config.model_type == "qwen3_moe" else None,
    )


def _read_experts(config: PreTrainedConfig) -> Experts:
    return Experts(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        ffn_size=config.moe_intermediate_size,
        renormalized=config.norm_topk_prob,
    )


def _unsupported(checkpoint: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(f"the trainer does not support the model in {str(checkpoint)!r}: {found}, expected {expected}")
