"""A checkpoint's model as its files describe it, read as JSON, and whether a run can use it; other models, too."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from async_rl.checks.preflight.layout import require_layout
from async_rl.checks.preflight.weight_dtypes import require_dtypes
from async_rl.checks.preflight.weight_files import (
    HEAD,
    require_kinds,
    require_layer_sizes,
    require_names,
    require_sizes,
    require_tied_head,
    stored_tensors,
)
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.model_families import MLP_BIAS, OUT_BIAS, QKV_BIAS, SAME_AS, SAVE_TEXT, TABLE
from async_rl.shared.model_limits import fp8_block
from async_rl.shared.model_parts import damaged
from async_rl.shared.model_shape import ModelShape
from async_rl.shared.net.hub import hub_fault

TEACHER = "algorithm.teacher"
CRITIC = "algorithm.options.critic_path"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
IMAGES_PREFIX = "model.language_model."
"""What precedes the names of a model that is a part of one with images."""

VALUE_HEADS = ("score.", "v_head.", "value_head.")
"""Of reward models and critics, which need no other head."""

CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "additional_chat_templates/*.jinja")

TEMPLATE_FILE = "chat_template.jinja"
"""As tokenizers save it; a chat_template.json is a processor's, which no tokenizer reads."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint: its directory, or None on the hub, where only `config` and `tokenizer_config` are read.

    `setting` is the key that names it.
    """

    name: str
    directory: Path | None
    config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    setting: str = "model.path"

    @classmethod
    def find(cls, name: str, setting: str = "model.path", *, is_whole: bool = True) -> "ModelFiles":
        """The files of the checkpoint called `name`, the value of `setting`: a directory or a hub name.

        Args:
            is_whole: without it config.json is enough.

        Raises:
            ConfigError: there is no such checkpoint, it may not be read, or it has no config or no tokenizer.
        """
        try:
            if not Path(name).exists():
                return cls._of_hub(name, setting)
            files = cls._of_directory(name, setting)
            missing = files.without_tokenizer() if is_whole else None
        except OSError as error:
            # A path that is too long, or below a directory that may not be read.
            raise ConfigError(f"{setting} {name!r} cannot be read: {error.strerror}; name another path") from error
        if missing:
            raise missing
        return files

    @classmethod
    def _of_directory(cls, name: str, setting: str) -> "ModelFiles":
        directory = Path(name)
        if not (directory / "config.json").is_file():
            if (directory / "adapter_config.json").is_file():
                raise ConfigError(
                    f"{setting} {name!r} has adapters, not a model: name their base, and them as adapter.path; or make "
                    f"a model of both (async-rl export {name} --merge --to DIR)"
                )
            raise ConfigError(f"{setting} {name!r} has no config.json: give a Hugging Face checkpoint directory")
        tokenizer_config = directory / "tokenizer_config.json"
        return cls(
            name,
            directory,
            _read_json(f"{setting} {name!r}", directory / "config.json"),
            _read_json(f"{setting} {name!r}", tokenizer_config) if tokenizer_config.is_file() else {},
            setting,
        )

    @classmethod
    def _of_hub(cls, name: str, setting: str) -> "ModelFiles":
        # No model of these families is on the hub without an owner, and the hub is asked for half a minute.
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise ConfigError(
                f"{setting} {name!r} does not exist: give a Hugging Face checkpoint directory, or a hub name OWNER/NAME"
            )
        if find_spec("huggingface_hub") is None:
            raise ConfigError(
                f"{setting} {name!r} is no directory, and without the package huggingface-hub it cannot be found "
                "on the hub: install async-rl[trainer], or give a directory"
            )
        config = _from_hub(name, "config.json")
        if not isinstance(config, Path):
            raise ConfigError(
                f"{setting} {name!r} is neither a directory nor a model that can be fetched from the hub: {config}; "
                "give a directory with config.json, or check the name and the network"
            )
        tokenizer = _from_hub(name, "tokenizer_config.json")
        return cls(
            name,
            None,
            _read_json(f"{setting} {name!r}", config),
            _read_json(f"{setting} {name!r}", tokenizer) if isinstance(tokenizer, Path) else {},
            setting,
        )

    def without_tokenizer(self) -> ConfigError | None:
        """What to say if its directory has no tokenizer."""
        if self.directory is None or any((self.directory / file).is_file() for file in TOKENIZER_FILES):
            return None
        return ConfigError(
            f"{self.named} has no tokenizer: expected {' or '.join(TOKENIZER_FILES)} in it; save the "
            "tokenizer into the checkpoint's directory (tokenizer.save_pretrained)"
        )

    def of_own_code(self) -> ConfigError | None:
        """What to say if only code that the checkpoint brings, which is not run, reads its config or tokenizer."""
        if (own := self.config.get("model_type")) in SAME_AS:
            return ConfigError(
                f"{self.named} has model_type {own!r}, a name that transformers does not know for the model "
                f"{SAME_AS[own]!r}: write that name into its config.json, and remove auto_map there"
            )
        code = self.tokenizer_config.get("auto_map")
        is_read = self.directory is None or (self.directory / "tokenizer.json").is_file()
        if not isinstance(code, dict) or "AutoTokenizer" not in code or is_read:
            return None
        return ConfigError(
            f"{self.named} has a tokenizer that only code of its own reads ({code['AutoTokenizer']} in auto_map of its "
            "tokenizer_config.json), and no code of a checkpoint is run: expected a tokenizer.json; convert the "
            "tokenizer (transformers' convert_slow_tokenizer has a TikTokenConverter), save_pretrained it there"
        )

    def without_weights(self) -> ConfigError | None:
        """What to say if its directory has no weights, or not all."""
        if self.directory is None:
            return None
        try:
            stored_tensors(self.directory)
        except ConfigError as error:
            return ConfigError(f"{self.setting} {error}")
        return None

    @property
    def shape(self) -> ModelShape:
        """What its config.json describes.

        Raises:
            ConfigError: no model that the trainer supports.
        """
        return ModelShape.of_config(self.config, self.named)

    @property
    def named(self) -> str:
        return f"{self.setting} {self.name!r}"

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model has positions for; None if its config.json does not say it.

        Raises:
            ConfigError: it says something else.
        """
        positions = self.config.get("max_position_embeddings")
        if positions is not None and (type(positions) is not int or positions < 1):
            raise damaged(self.named, "max_position_embeddings", positions, "a number from 1")
        return positions

    @property
    def highest_token(self) -> int | None:
        """The highest id that tokenizer.json has; None without one, or without ids in it.

        Raises:
            ConfigError: it is damaged.
        """
        if self.directory is None or not (self.directory / "tokenizer.json").is_file():
            return None
        return max(_token_ids(self.named, self.directory / "tokenizer.json"), default=None)

    @property
    def has_chat_template(self) -> bool:
        """Whether its tokenizer has one, in its config or in a file beside it."""
        if self.tokenizer_config.get("chat_template"):
            return True
        if self.directory is None:
            return isinstance(_from_hub(self.name, TEMPLATE_FILE), Path)
        return (self.directory / TEMPLATE_FILE).is_file()


def find_checkpoint(path: str, setting: str = "model.path") -> Path:
    """The directory of the checkpoint called `path`, the value of `setting`: a local directory, or a hub name,
    downloaded once into HF's cache.

    Raises:
        ConfigError: `path` is neither.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if Path(path).exists():
        raise ConfigError(f"{setting} {path!r} has no config.json: give a Hugging Face checkpoint directory")
    hub, errors = import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    fault = hub_fault()
    try:
        return Path(hub.snapshot_download(path, allow_patterns=list(CHECKPOINT_FILES)))
    except (errors.HFValidationError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"{setting} {path!r} is neither a directory nor a model that can be fetched from the hub: {fault or error}"
        ) from error


def read_shape(name: Path | str, setting: str = "model.path") -> ModelShape:
    """The model of a checkpoint, of which config.json is enough.

    Raises:
        ConfigError: as `ModelFiles.find` and `ModelFiles.shape`.
    """
    return ModelFiles.find(str(name), setting, is_whole=False).shape


def require_trainable(config: Config, files: ModelFiles, *, is_whole: bool = True) -> None:
    """Checks that the trainer supports the model, and can render prompts for it.

    Args:
        is_whole: without it weights and tokenizer may be missing.

    Raises:
        ConfigError: one is not the case.
    """
    require_supported(files, is_whole=is_whole)
    if is_whole and (unread := files.of_own_code()):
        raise unread
    is_unserved = config.inference.engine == "vllm" or bool(files.shape.latents or files.shape.delta)
    if fp8_block(files.config) and is_unserved and not config.pool.instances:
        # vLLM keeps weights in fp8, which have other names and sizes than the trainer's; transformers reads no blocks
        # that are not whole, as those of latents and of gated delta nets' rates. Instances that run elsewhere may have
        # another checkpoint.
        raise ConfigError(
            f"{files.named} is in fp8 (quantization_config of its config.json), which inference.engine = "
            f"{config.inference.engine!r} does not serve with the trainer's weights: name the checkpoint in bfloat16, "
            "or save it so (README of the model, or DeepSeek-V3's fp8_cast_bf16.py)"
        )
    has_tokenizer = is_whole or files.without_tokenizer() is None
    if config.prompts.chat_template and has_tokenizer and not files.has_chat_template:
        raise ConfigError(
            f"prompts.chat_template is true, but the tokenizer in model.path {files.name!r} has no chat template: set "
            "prompts.chat_template = false, or save one with the tokenizer"
        )


def require_supported(files: ModelFiles, *, is_whole: bool = True) -> None:
    """Checks that the trainer supports the model's architecture and, with `is_whole`, that its weights are present.

    Raises:
        ConfigError: one is not the case.
    """
    shape = files.shape
    if is_whole and (missing := files.without_weights()):
        raise missing
    if is_whole and files.directory is not None:
        _require_fitting_files(files, shape, files.directory)


def _require_fitting_files(files: ModelFiles, shape: ModelShape, directory: Path) -> None:
    """Checks what is silently left out, or found late, where files and config.json do not belong together."""
    named, tensors = files.named, stored_tensors(directory)
    if any(name.startswith(IMAGES_PREFIX) for name in tensors):
        raise ConfigError(
            f"{named} has its tensors under {IMAGES_PREFIX!r}, as a part of a model with images: {SAVE_TEXT}"
        )
    require_dtypes(named, files.config, tensors)
    require_sizes(named, shape, tensors)
    require_kinds(named, shape, tensors)
    require_layer_sizes(named, shape, tensors)
    is_policy = not any(name.startswith(VALUE_HEADS) for name in tensors)
    if HEAD not in tensors and not shape.tied and is_policy:
        raise ConfigError(
            f"{named} has no {HEAD}, though its config.json has tie_word_embeddings = false: save the model whole, or "
            "set tie_word_embeddings to true if its output layer is the embedding"
        )
    if shape.tied:
        require_tied_head(named, tensors)
    for name in sorted(name for name in tensors if name.endswith("_proj.bias")):
        feature = MLP_BIAS if ".mlp." in name else OUT_BIAS if ".o_proj." in name else QKV_BIAS
        if not shape.has(feature):
            keys = [key for key, features in TABLE[shape.family].features_of.items() if feature in features]
            raise ConfigError(
                f"{named} has {name}, which models of its model_type {shape.family!r} "
                f"{f'have with {keys[0]} true only' if keys else 'do not have'}: name a checkpoint without biases, or "
                "one whose config.json is its own"
            )
    require_names(named, shape, tensors)
    highest = files.highest_token
    if highest is not None and highest >= shape.vocab_size:
        raise ConfigError(
            f"{named} has a tokenizer with tokens up to {highest}, but the model's vocabulary ends at "
            f"{shape.vocab_size - 1} (vocab_size of config.json): resize the model's embeddings, or save the tokenizer "
            "that belongs to it"
        )


@cache
def _from_hub(name: str, file: str) -> Path | str:
    """A file of a checkpoint on the hub, or why it cannot be had; asked once: without a network that takes long."""
    # Imported here: the import takes a quarter of a second.
    hub, errors = import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    fault = hub_fault()
    try:
        return Path(hub.hf_hub_download(name, file))
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        return fault or str(error).strip().partition("\n")[0]


def _read_json(named: str, file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{named}: {file} cannot be read: {error}; download or save it again") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{named}: {file} holds {type(read).__name__}, expected an object")
    return read


def _token_ids(named: str, file: Path) -> list[int]:
    """Those that a tokenizer.json has; a vocabulary that is a list has them by its order.

    Raises:
        ConfigError: it is damaged.
    """

    def damaged_by(key: str, found: object, expected: str) -> ConfigError:
        return ConfigError(f"{named}: {file} has {key} {found}, expected {expected}; download or save it again")

    def part(of: dict[str, Any], key: str, *kinds: type) -> Any:
        found = of.get(key)
        if found is not None and not isinstance(found, kinds):
            expected = " or ".join("an object" if kind is dict else "a list" for kind in kinds)
            raise damaged_by(key, f"of type {type(found).__name__}", expected)
        return kinds[0]() if found is None else found

    tokenizer = _read_json(named, file)
    vocabulary, added = part(part(tokenizer, "model", dict), "vocab", dict, list), part(tokenizer, "added_tokens", list)
    of_vocabulary = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    of_added: list[Any] = [each.get("id") if isinstance(each, dict) else each for each in added]
    for key, ids in (("vocab", of_vocabulary), ("added_tokens", of_added)):
        for token in ids:
            if type(token) is not int or token < 0:
                raise damaged_by(key, f"with the id {token!r}", "a number from 0")
    return [*of_vocabulary, *of_added]


def require_other_models(config: Config, policy: ModelFiles, num_ranks: int, *, is_whole: bool = True) -> None:
    """Checks that `algorithm.teacher` and its `critic_path`, where set, can read the policy's tokens on the ranks.

    Args:
        num_ranks: the training ranks.
        is_whole: without it weights and tokenizer may be missing.

    Raises:
        ConfigError: one cannot; names the setting.
    """
    for setting, name in ((TEACHER, config.algorithm.teacher), (CRITIC, config.algorithm.critic.critic_path)):
        if name is None:
            continue
        model = ModelFiles.find(name, setting, is_whole=is_whole)
        require_supported(model, is_whole=is_whole)
        try:
            require_layout(config.trainer, model.shape, num_ranks)
        except ConfigError as fault:
            raise ConfigError(f"{model.named}, which has the policy's layout: {fault}") from fault
        own, expected = model.shape.vocab_size, policy.config.get("vocab_size")
        if own != expected:
            raise ConfigError(
                f"{model.named} has a vocabulary of {own} tokens, model.path {policy.name!r} one of "
                f"{expected}: it reads the policy's tokens; name a checkpoint with the same tokenizer"
            )
