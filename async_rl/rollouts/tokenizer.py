"""The tokenizer of a run's model, and what a response of that model may be, from its checkpoint."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

from async_rl.errors import ConfigError
from async_rl.rollouts.data.prompts import Tokenizer
from async_rl.rollouts.instance.model_tokens import ModelTokens
from async_rl.shared.end_tokens import EndTokens
from async_rl.shared.protocol.routed_experts import RouteShape

log = logging.getLogger(__name__)

QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_tokenizer(name: str, checkpoint: str | Path) -> tuple[Tokenizer, ModelTokens]:
    """Of the model called `name` in the config, whose files are those of `checkpoint`, a directory or a hub name.

    Raises:
        ConfigError: it has no tokenizer that loads, or its config.json is none that transformers reads.
    """
    # Not with the module: programs name a missing extra themselves.
    with _without_torch():
        from async_rl.shared.cpu.model_scan import scan_models_once

        scan_models_once()
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

    try:
        # With the defaults of its class, which engines take for what the file leaves out.
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False).to_dict()
        said, _ = PreTrainedConfig.get_config_dict(checkpoint)
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        # A key alone says nothing.
        kind = f"{type(error).__name__}: " if isinstance(error, LookupError) else ""
        why = kind + " ".join(str(error).split())
        raise ConfigError(
            f"model.path {name!r} has a config.json that transformers does not read, and so no instance: {why}; "
            "correct it, or download it again"
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:
        # The package tokenizers raises no narrower class, as for a file of a later version of its own.
        kind = f"{type(error).__name__}: " if isinstance(error, LookupError) else ""
        raise ConfigError(f"model.path {name!r} has no tokenizer that loads: {kind}{error}") from error
    try:
        generation_config = GenerationConfig.from_pretrained(checkpoint).to_dict()
    except OSError:
        generation_config = {}
    # A tokenizer's file may ask to take spaces before punctuation out: the text would not be that of the tokens.
    tokenizer.clean_up_tokenization_spaces = False
    ends = EndTokens.of(tokenizer.eos_token_id, generation_config, config, config["vocab_size"], config_file=said)
    if ends.warning:
        log.warning("model.path %r: %s", name, ends.warning)

    def text_of(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    return cast(Tokenizer, tokenizer), ModelTokens(config["vocab_size"], ends.ids, text_of, _routes_of(config))


def _routes_of(config: Mapping[str, Any]) -> RouteShape | None:
    """Of the experts of a model with this config.json; None without any."""
    counts = (config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    if (num_experts := next(filter(None, counts), None)) is None:
        return None
    return RouteShape(config["num_hidden_layers"], config["num_experts_per_tok"], num_experts)


@contextmanager
def _without_torch() -> Iterator[None]:
    """In its body, transformers finds no torch: a tokenizer needs none, and it takes seconds to load.

    A process that has loaded either goes on with it.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    find_spec = importlib.util.find_spec

    def find_other(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name, package)

    importlib.util.find_spec = find_other
    # Or it says that models cannot be had.
    os.environ[QUIET] = "1"
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
        del os.environ[QUIET]
