"""transformers' callbacks: what they are given, and which cannot work here."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from async_rl.errors import ConfigError

EVENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end"), ()),
    **{"on_log": ("logs",), "on_evaluate": ("metrics",), "on_epoch_end": (), "on_train_end": ()},
}
"""Those that come, and what they have besides the arguments, the state and the control."""

NEVER = ("on_save", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_push_begin")
"""What happens then happens in other processes."""


@dataclass
class State:
    """transformers' `TrainerState`."""

    max_steps: int
    logging_steps: float
    eval_steps: float | None
    save_steps: float
    train_batch_size: int
    num_train_epochs: float
    epoch: float = 0.0
    global_step: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: Mapping[str, Any] | None = None
    stateful_callbacks: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Control:
    """transformers' `TrainerControl`."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


def checked(callbacks: Any) -> list[Any]:
    """The callbacks, made where they are classes.

    Raises:
        ConfigError: they are no list; one waits for an event that does not come, or takes more than there is.
    """
    if callbacks is not None and not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is {callbacks!r:.200}: expected a list of them")
    made = [each() if isinstance(each, type) else each for each in callbacks or ()]
    for place, each in enumerate(made):
        _require_callback(f"callbacks[{place}], {type(each).__name__},", each)
    return made


def _require_callback(named: str, callback: Any) -> None:
    for event in NEVER:
        method = getattr(type(callback), event, None)
        if method is not None and method.__module__ != "transformers.trainer_callback":
            raise ConfigError(f"{named} has {event}, which does not come here: expected some of {', '.join(EVENTS)}")
    for event, more in EVENTS.items():
        if (method := getattr(callback, event, None)) is None:
            continue
        try:
            inspect.signature(method).bind(None, None, None, **dict.fromkeys(more))
        except (TypeError, ValueError) as error:
            given = ", ".join(("args", "state", "control", *more))
            raise ConfigError(f"{named} cannot be called at {event}: {error}; it is given {given}") from error


def call(callbacks: Sequence[Any], event: str, args: Any, state: State, control: Control, **more: Any) -> None:
    """One after the other; they change the control, or return another, as transformers' own do."""
    for callback in callbacks:
        if (method := getattr(callback, event, None)) is not None:
            changed = method(args, state, control, **more)
            for each in fields(control):
                if changed is not None and getattr(changed, each.name, False):
                    setattr(control, each.name, True)
    for name in ("should_epoch_stop", "should_save", "should_evaluate"):
        if getattr(control, name):
            setattr(control, name, False)
            warnings.warn(f"a callback set control.{name}, which has no effect here", stacklevel=2)
