"""TRL's `reward_funcs` as parts of a reward: functions, and models that classify sequences."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from async_rl.checks.preflight.model import ModelFiles
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.base import CORRECT_AT
from async_rl.shared.programs.user_file import is_async

STATE = "trainer_state"
MODEL_TIMEOUT_S = 600.0
"""For a group, where a reward is a model: the first one waits until it is loaded."""


def parts_of(given: Any, weights: Sequence[float] | None, template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The [[reward.parts]] of `reward_funcs`.

    Args:
        weights: TRL's `reward_weights`; by default 1 each.
        template: arguments of the chat template, for the models' texts.

    Raises:
        ConfigError: there is none, one is of another kind, or there are more or fewer weights.
    """
    functions = _listed(given)
    if not functions:
        raise ConfigError("reward_funcs is empty: give a function, the name of a model, or a list of them")
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers, reward_funcs {len(functions)}: give one for each"
        )
    labels = list(_labels(functions))
    return [
        {"name": _reward(f"reward_funcs[{place}]", each, template), "weight": float(weight), "label": label}
        for place, (each, weight, label) in enumerate(
            zip(functions, [1.0] * len(functions) if weights is None else weights, labels, strict=True)
        )
    ]


def has_model(given: Any) -> bool:
    """Whether a part of `reward_funcs` is a model."""
    return any(isinstance(each, str) for each in _listed(given))


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]


def _labels(functions: Sequence[Any]) -> Iterator[str]:
    """TRL's names of them in figures, as far as names here may be such."""
    seen: set[str] = set()
    for place, each in enumerate(functions):
        name = each.rsplit("/", 1)[-1] if isinstance(each, str) else getattr(each, "__name__", type(each).__name__)
        name = "".join(c if c.isalnum() or c in "_-" else "_" for c in name).strip("_") or "reward"
        yield name if name not in seen else f"{name}_{place}"
        seen.add(name)


def _reward(setting: str, given: Any, template: Mapping[str, Any]) -> Callable[..., Any]:
    if isinstance(given, str):
        ModelFiles.find(given, setting, is_whole=False)
        return of_model(given, dict(template))
    if hasattr(given, "save_pretrained"):
        raise ConfigError(f"{setting} is a loaded model: give its folder or its name, from which a process loads it")
    if not callable(given):
        raise ConfigError(f"{setting} is {given!r:.200}: expected a function, or the folder or name of a model")
    return of_function(setting, given)


def of_function(setting: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """It with everything that TRL gives a function, of which it gets what it takes; None and NaN count as 0 in the sum.

    Raises:
        ConfigError: it needs the state of a trainer, which is in another process.
    """
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    if STATE in parameters and parameters[STATE].default is inspect.Parameter.empty:
        raise ConfigError(f"{setting} takes {STATE}, which is in another process: leave it out")
    takes_any = not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    names = frozenset(parameters)

    def arguments(given: dict[str, Any]) -> dict[str, Any]:
        given |= {"log_extra": _nothing, "log_metric": _nothing}
        return {name: value for name, value in given.items() if takes_any or name in names}

    def numbers(found: Any) -> Any:
        found = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(found, list | tuple):
            return found
        return [0.0 if each is None or each != each else each for each in found]

    def score(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        return numbers(function(**arguments(given | columns)))

    async def score_async(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        return numbers(await function(**arguments(given | columns)))

    made = score_async if is_async(function) else score
    if hasattr(function, CORRECT_AT):
        setattr(made, CORRECT_AT, getattr(function, CORRECT_AT))
    return made


def _nothing(*_: Any, **__: Any) -> None: ...


def of_model(name: str, template: dict[str, Any]) -> Callable[..., Any]:
    """The first logit that a sequence-classification model gives to prompt and completion."""
    loaded: list[Any] = []

    def score(prompts: Any, completions: Any, **_: Any) -> list[float]:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not loaded:
            tokenizer = AutoTokenizer.from_pretrained(name)
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1).eval()
            model.config.pad_token_id = tokenizer.pad_token_id
            loaded.extend((tokenizer, model))
        tokenizer, model = loaded
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **template)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        options = {"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False}
        with torch.inference_mode():
            logits_BL = model(**tokenizer(texts, **options)).logits
        return [float(logit) for logit in logits_BL[:, 0]]

    return score
