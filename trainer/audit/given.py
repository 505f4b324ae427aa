"""What an audit is given: its options, the tokenizer's texts, and the weights or adapters of the step before."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from async_rl.checks.preflight.model import ModelFiles
from async_rl.errors import ConfigError
from async_rl.rollouts.tokenizer import load_tokenizer
from async_rl.shared.end_tokens import EndTokens
from async_rl.shared.protocol.adapter import CONFIG_FILE
from trainer.audit.exact_model import Adapter, ExactModel, load_exact, read_adapter
from trainer.audit.hypotheses import Hypothesis, Values, of_before, with_adapters
from trainer.audit.probes import MESSAGES, TEXTS


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; see `__main__.make_parser`."""

    engine: str
    checkpoint: str
    adapter: Path | None = None
    before: Path | None = None
    update_via: str | None = None
    dtype: str | None = None
    temperature: float | None = None
    model: str | None = None
    device: str = "cpu"
    timeout_s: float = 300.0
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """What the checkpoint's tokenizer, if it has one, makes of the probes' texts."""

    texts: Sequence[Sequence[int]]
    chat: Sequence[int] | None
    bos: int | None
    ends: tuple[int, ...]


def find_files(name: str, option: str) -> ModelFiles:
    files = ModelFiles.find(name, option, is_whole=False)
    if files.directory is None:
        raise ConfigError(f"{option} {name!r} is a name on the hub: download it, and give its directory")
    return files


def read_words(files: ModelFiles) -> Words:
    """
    Raises:
        ConfigError: it has a tokenizer that does not load, or a chat template that renders nothing.
    """
    if files.without_tokenizer() is not None:
        named = EndTokens.of(None, {}, files.config, files.config.get("vocab_size"))
        return Words((), None, files.config.get("bos_token_id"), named.ids)
    try:
        tokenizer, tokens = load_tokenizer(files.name, str(files.directory))
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", files.setting, 1)) from error
    any_tokenizer: Any = tokenizer
    texts = [list(any_tokenizer(text)["input_ids"]) for text in TEXTS]
    chat = None
    if any_tokenizer.chat_template:
        try:
            rendered = any_tokenizer.apply_chat_template(list(MESSAGES), add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError) as error:
            raise ConfigError(
                f"{files.named} has a chat template that does not render {list(MESSAGES)}: {error}; correct it"
            ) from error
        chat = list(any_tokenizer(rendered, add_special_tokens=False)["input_ids"])
    # What every source names: engines differ in which of them they read.
    own = any_tokenizer.eos_token_id
    ends = tuple(token for token in tokens.end_token_ids if token == own) or tokens.end_token_ids
    bos = any_tokenizer.bos_token_id
    return Words(texts, chat, files.config.get("bos_token_id") if bos is None else bos, ends)


def put_adapters(exact: ExactModel, adapters: dict[str, Adapter]) -> None:
    """Merges them into the model, whose they are from then on."""
    exact.adapters = adapters
    for name, adapter in adapters.items():
        exact.layer(name).weight.data += adapter.delta


@dataclass(frozen=True, slots=True)
class Before:
    """The weights, or the adapters, of the step before, if they were given."""

    values: Values | None = None
    adapters: dict[str, Adapter] | None = None

    @classmethod
    def read(cls, options: Options, exact: ExactModel, files: ModelFiles, dtype: str) -> "Before":
        """
        Raises:
            ConfigError: they are of another model.
        """
        if options.before is None:
            return cls()
        if (options.before / CONFIG_FILE).is_file():
            if options.adapter is None:
                raise ConfigError(f"--before {str(options.before)!r} has adapters: give the new ones as --adapter")
            return cls(adapters=read_adapter(options.before, exact, files, "--before"))
        older = load_exact(find_files(str(options.before), "--before"), dtype, options.device).parameters()
        own = exact.parameters()
        for name in own.keys() | older.keys():
            there, here = (list(each[name].shape) if name in each else None for each in (older, own))
            if there != here:
                raise ConfigError(
                    f"--before {str(options.before)!r} has {name} of shape {there}, and --checkpoint {here}: give an "
                    "older checkpoint of the same model"
                )
        for name, adapter in exact.adapters.items():
            older[f"{name}.weight"] = older[f"{name}.weight"] + adapter.delta
        return cls(values=older)

    def hypotheses(self, exact: ExactModel) -> list[Hypothesis]:
        if self.adapters is not None:
            return [with_adapters("adapters: an older version", exact, self.adapters)]
        return [] if self.values is None else list(of_before(exact, self.values))
