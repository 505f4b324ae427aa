"""The tokenizer of a run's model, and what a response of that model may be, from its checkpoint."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from async_rl.data.prompts import Tokenizer
from async_rl.end_tokens import EndTokens
from async_rl.errors import ConfigError
from async_rl.instance.model_tokens import ModelTokens

log = logging.getLogger(__name__)


def load_tokenizer(name: str, checkpoint: str | Path) -> tuple[Tokenizer, ModelTokens]:
    """Of the model called `name` in the config, whose files are those of `checkpoint`, a directory or a hub name.

    Raises:
        ConfigError: it has no tokenizer, or no config, that loads.
    """
    # Not with the module: programs name a missing extra themselves.
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        # With the defaults of its class, which engines take for what the file leaves out.
        config = AutoConfig.from_pretrained(checkpoint).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {name!r} has no tokenizer that loads: {error}") from error
    try:
        generation_config = GenerationConfig.from_pretrained(checkpoint).to_dict()
    except OSError:
        generation_config = {}
    # A tokenizer's file may ask to take spaces before punctuation out: the text would not be that of the tokens.
    tokenizer.clean_up_tokenization_spaces = False
    ends = EndTokens.of(tokenizer.eos_token_id, generation_config, config, config["vocab_size"])
    if ends.warning:
        log.warning("model.path %r: %s", name, ends.warning)

    def text_of(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    return cast(Tokenizer, tokenizer), ModelTokens(config["vocab_size"], ends.ids, text_of)
