"""The README.md of an exported checkpoint, a model card in the format of the Hugging Face hub; for `trainer.export`.

It says what the checkpoint's manifest and the run's records hold, and names what they do not.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from async_rl import __version__
from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.config.secrets import MASK, masked
from async_rl.config.sections import Config
from trainer.model_card import history
from trainer.model_card.markdown import code, fenced, plain, table

FILE = "README.md"

HUB_DATA = "hf:"

PACKAGES = ("torch", "transformers", "megatron-core")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Exported:
    """What is described: a checkpoint's config, its place in the run, and the name of the exported directory.

    `iteration` is trained next; `num_steps` optimizer steps were taken until then. `base_on_hub` says whether `base`,
    the model that was trained, is a name of the hub, and not a directory, `is_adapter` whether adapters were exported
    alone.
    """

    name: str
    config: Config
    iteration: int
    num_steps: int
    base: str
    base_on_hub: bool
    is_adapter: bool = False


def model_card(exported: Exported, run_dir: Path) -> str:
    """The card's text; files of `run_dir` may be missing or damaged."""
    records = history.History(run_dir, exported.iteration)
    sections = {
        "How to load it": _loading(exported),
        "Training": _training(exported),
        "Curves": history.curves(records),
        "Evaluation": history.evaluations(records),
        "On-policy proof": history.proof(records),
        "Settings": _settings(exported.config),
        "Versions": _versions(),
    }
    bodies = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    head = f"---\n{_front_matter(exported)}\n---\n\n# {plain(exported.name)}"
    return f"{head}\n\n{_summary(exported, records)}\n\n{bodies}\n"


def _front_matter(exported: Exported) -> str:
    hub_base = exported.base if exported.base_on_hub and _HUB_NAME.fullmatch(exported.base) else None
    tags = ["async-rl", "reinforcement-learning"]
    if exported.is_adapter:
        # As peft marks its own cards.
        tags += ["lora", *([f"base_model:adapter:{hub_base}"] if hub_base else [])]
    data = ModelCardData(
        base_model=hub_base,
        datasets=_hub_datasets(exported.config) or None,
        library_name="peft" if exported.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
    )
    return str(data.to_yaml()).strip()


def _hub_datasets(config: Config) -> list[str]:
    names = [source.removeprefix(HUB_DATA).split(":")[0] for source in _sources(config) if source.startswith(HUB_DATA)]
    return [name for name in dict.fromkeys(names) if _HUB_NAME.fullmatch(name)]


def _sources(config: Config) -> list[str]:
    prompts = config.prompts
    return [part.source for part in prompts.mixture] if prompts.source is None else [prompts.source]


def _summary(exported: Exported, records: history.History) -> str:
    base = _code(exported.base, "path")
    what, how = ("The policy", "trained from") if not exported.is_adapter else ("Adapters (LoRA)", "trained beside")
    text = (
        f"{what} of a run of async-rl after {exported.iteration} iterations ({exported.num_steps} optimizer "
        f"steps), {how} {base} by reinforcement learning. `async-rl export` wrote this card from the checkpoint "
        "and the run's records; it says nothing that they do not hold. They hold no licence, no languages and no "
        "limits of use: add those before you publish it."
    )
    bad = ", ".join(f"{count} of {code(name)}" for name, count in sorted(records.unreadable.items()))
    return text + (f"\n\nLines that could not be read were left out: {bad}." if bad else "")


def _loading(exported: Exported) -> str:
    name = json.dumps(exported.name, ensure_ascii=True)
    if exported.is_adapter:
        return _loading_adapter(exported, name)
    python = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"directory = {name}  # this one\n"
        "tokenizer = AutoTokenizer.from_pretrained(directory)\n"
        "model = AutoModelForCausalLM.from_pretrained(directory)"
    )
    note = f"The weights are safetensors in {code(exported.config.model.dtype)}."
    if exported.config.prompts.system_prompt is not None:
        note += " Prompts were trained with the system prompt below (`prompts.system_prompt`)."
    elif not exported.config.prompts.chat_template:
        note += " Prompts were trained as plain text, without a chat template."
    return f"{fenced(python, 'python')}\n\n{note} vLLM serves the directory as well."


def _loading_adapter(exported: Exported, name: str) -> str:
    python = (
        "from peft import AutoPeftModelForCausalLM\n\n"
        f"directory = {name}  # this one\n"
        "model = AutoPeftModelForCausalLM.from_pretrained(directory)  # with the base model of adapter_config.json"
    )
    return (
        f"{fenced(python, 'python')}\n\nThe adapters are safetensors in float32, of no use without their base, "
        f"{_code(exported.base, 'path')}. vLLM serves them beside it (`--enable-lora --lora-modules "
        f"NAME=DIRECTORY --max-lora-rank {exported.config.adapter.vllm_rank}`)."
    )


def _training(exported: Exported) -> str:
    config = exported.config
    prompts, rollout = config.prompts, config.rollout
    rewards = [_code(name, "name") for each in config.reward.single_rewards.values() if (name := each.name) is not None]
    rows: Mapping[str, str] = {
        "base model": _code(exported.base, "path"),
        "data": ", ".join(_code(source, "source") for source in _sources(config)),
        "rollouts": "single turns" if rollout.program == SINGLE_TURN else _code(rollout.program, "program"),
        "reward": ", ".join(rewards) or "the program's own",
        "algorithm": _code(config.algorithm.name, "name"),
        "batch": f"{prompts.prompts_per_batch} prompts x {rollout.responses_per_prompt} responses",
        "responses": f"{rollout.max_response_tokens} tokens at most, temperature {rollout.temperature:g}",
        "learning rate": f"{config.optimizer.learning_rate:g}",
        "precision": code(config.model.dtype),
    }
    if config.adapter.is_given:
        merged = "" if exported.is_adapter else ", merged into the weights"
        size = f"rank {config.adapter.rank}, alpha {config.adapter.alpha:g}"
        rows = {**rows, "adapters": f"{size}, of {', '.join(map(code, config.adapter.targets))}{merged}"}
    return table(["", ""], [list(row) for row in rows.items()], of_numbers=False)


def _code(value: str, key: str) -> str:
    return code(shown(value, key))


def _settings(config: Config) -> str:
    return (
        "Keys that differ from the defaults, without those of machines; secrets and folders are masked.\n\n"
        + fenced(settings_toml(config), "toml")
    )


def _versions() -> str:
    installed = {name: _version(name) for name in PACKAGES}
    named = ", ".join(f"{name} {number}" for name, number in {"async-rl": __version__, **installed}.items())
    return f"Exported with {named}. The records do not hold the versions that trained it."


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


SHOWN = ("model", "prompts", "rollout", "reward", "algorithm", "adapter", "optimizer", "train", "trainer")
"""Sections that decide what was trained; others name hosts, ports and directories."""

PROSE = ("system_prompt", "stop")
"""Keys whose texts contain no paths."""

_SECRET_KEY = re.compile(r"token|secret|passw(?:or)?d|api[-_]?key|credential|authorization", re.IGNORECASE)
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S+")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_FOLDERS = re.compile(r"(^|[\s=:'\"(])~?/(?:[^/\s:'\"]+/)+")


def settings_toml(config: Config) -> str:
    """The settings that differ from their defaults, of the sections `SHOWN` and `run.seed`."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    lines = [f"run.seed = {config.run.seed}"]
    for section in SHOWN:
        lines += [f"{section}.{key} = {_toml(shown(value, key))}" for key, value in _values(tree.get(section, {}))]
    return "\n".join(lines)


def shown(value: Any, key: str = "") -> Any:
    """A value of a config without secrets and without folders of absolute paths; `key` is its name."""
    if isinstance(value, dict):
        return {name: shown(each, name) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [shown(each, key) for each in value]
    if not isinstance(value, str):
        return value
    if _SECRET_KEY.search(key):
        return MASK
    value = _QUERY.sub(rf"\1?{MASK}", masked(key, value))
    return value if key in PROSE else _FOLDERS.sub(r"\1.../", value)


def _values(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in section.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(name)} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's other values are TOML's; what a reader cannot see is escaped.
    return "".join(map(_visible, json.dumps(value, ensure_ascii=False)))


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _toml(name)


def _visible(sign: str) -> str:
    if sign.isprintable():
        return sign
    return f"\\u{ord(sign):04x}" if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}"
