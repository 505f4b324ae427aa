"""Loads a Hugging Face checkpoint for the embedded engine, with errors that name a remedy."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FineGrainedFP8Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.quantization_config import Mxfp4Config

from async_rl.errors import ConfigError
from async_rl.shared.cpu.lean_imports import without_compiler
from async_rl.shared.cpu.memory import keep_freed_memory
from async_rl.shared.end_tokens import EndTokens
from async_rl.shared.layer_windows import FULL, LINEAR, SLIDING
from inference_service.engine.delta_net import has_delta_nets

log = logging.getLogger(__name__)

BY_CONFIG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StrictDataclassError)
"""What transformers raises of values in config.json; errors of devices are none of these."""


class Codec:
    """Text to token ids and back, for the text routes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A tokenizer's file may ask to take spaces before punctuation out: the text would not be that of the tokens.
        tokenizer.clean_up_tokenization_spaces = False

    @property
    def eos_token_id(self) -> object:
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for inference; `codec` is None if the checkpoint has no tokenizer (token ids only)."""

    model: PreTrainedModel
    codec: Codec | None
    eos_ids: frozenset[int]
    max_positions: int


def load_model(path: str, device: torch.device, dtype: torch.dtype, *, asleep: bool = False) -> LoadedModel:
    """Loads weights and tokenizer onto `device`; `asleep`, the model without memory for its weights there.

    Raises:
        ConfigError: no such checkpoint, an unusable one, or a kind of attention that this engine does not support.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device: use --device cpu, or install torch for CUDA")
    try:
        # The code of the model is imported here, and creating it calls functions that torch marks at their first call.
        with without_compiler() if device.type == "cpu" else nullcontext():
            # Attention is replaced (`ModelStep`), whatever transformers has for the family.
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, trust_remote_code=False, **_dequantized(path)
            )
    except SafetensorError as error:
        raise ConfigError(
            f"the weights of the model {path!r} are damaged, or were copied only in part: {error}; copy them again"
        ) from error
    except (OSError, *BY_CONFIG) as error:
        raise ConfigError(f"cannot load the model {path!r}: {type(error).__name__}: {_first_line(error)}") from error
    held = {FULL, SLIDING, *([LINEAR] if has_delta_nets(model.config) else [])}
    if others := set(getattr(model.config, "layer_types", None) or ()) - held:
        raise ConfigError(
            f"the model {path!r} has layers of {sorted(others)}: the transformers engine serves "
            f"{' and '.join(sorted(held))} of a {model.config.model_type!r} only; serve it with vLLM"
        )
    if device.type == "cpu":
        keep_freed_memory()
    if asleep:
        _drop_weights(model, device)
    # PreTrainedModel.to returns the model itself, but its annotation hides that.
    torch.nn.Module.to(model, device)
    codec = _load_codec(path)
    return LoadedModel(
        model.train(False),
        codec,
        _eos_ids(path, model, codec),
        int(model.config.max_position_embeddings),
    )


def _drop_weights(model: torch.nn.Module, device: torch.device) -> None:
    """Puts the parameters on `device` one after the other, each without its memory."""
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter, device=device, memory_format=torch.contiguous_format)
        parameter.untyped_storage().resize_(0)


def _dequantized(path: str) -> dict[str, FineGrainedFP8Config | Mxfp4Config]:
    """How to load a checkpoint in fp8 or mxfp4: with the values that it stands for, which a trainer's weights then
    replace."""
    quantized = getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "quantization_config", None)
    kinds = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    kind = kinds.get(quantized.get("quant_method", "")) if isinstance(quantized, dict) else None
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _load_codec(path: str) -> Codec | None:
    if Path(path).is_dir() and not (Path(path) / "tokenizer_config.json").is_file():
        return None
    try:
        return Codec(AutoTokenizer.from_pretrained(path, trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {path!r}: {_first_line(error)}") from error


def _eos_ids(path: str, model: PreTrainedModel, codec: Codec | None) -> frozenset[int]:
    generation = {} if model.generation_config is None else model.generation_config.to_dict()
    config = model.config.to_dict()
    said, _ = PreTrainedConfig.get_config_dict(path)
    ends = EndTokens.of(codec and codec.eos_token_id, generation, config, config.get("vocab_size"), config_file=said)
    if ends.warning:
        log.warning("the model %r: %s", path, ends.warning)
    return frozenset(ends.ids)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
