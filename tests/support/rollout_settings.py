"""`[rollout]` from settings without regard to which of them are options of a program."""

from typing import Any

from async_rl.config.rollout_section import ProgramOptions, RolloutSection


def rollout_section(**settings: Any) -> RolloutSection:
    """Of settings of both kinds: `rollout_section(program="command:true", max_turns=2)`."""
    own = {name: value for name, value in settings.items() if name not in ProgramOptions.model_fields}
    return RolloutSection(**own, options={name: settings[name] for name in settings.keys() - own.keys()})
