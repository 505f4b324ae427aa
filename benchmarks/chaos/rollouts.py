"""The kinds of rollouts that `benchmarks.chaos` puts under faults, as parts of a run's config."""

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w3 {{ m.content }} <eos> {% else %}w2 {{ m.content }} "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}w3{% endif %}"
)
"""For a tokenizer of words: each message after a word for its role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutKind:
    """One kind. `program` is its `rollout.program`, `settings` are further lines of `[rollout]`.

    `max_model_len` is that of instances. `worker` is a word of the command lines of the processes that run the program,
    None if there are none. `spoil` scales the share of disturbed requests.
    """

    program: str
    chat: bool
    max_model_len: int
    settings: str = ""
    worker: str | None = None
    spoil: float = 1.0
    max_turns: int = 1


PROMPT_TOKENS = 12
"""Words of a prompt."""

MAX_RESPONSE_TOKENS = 192
MAX_CHAT_TOKENS = 240
"""Less than a prompt, all sampled tokens and what is said between them may have: another limit that is reached."""

MAX_TURNS = 6
LIMITS = f"""[rollout.options]
renderer = "template"
max_turns = {MAX_TURNS}
max_attempts = 1000
num_workers = 2
"""
"""Faults come every few seconds here, and each of them may end every rollout of a process: so many attempts."""

SPOIL = 0.15
"""A rollout has several requests instead of one for a whole group."""

AGENT = str(HERE / "agent.py")

KINDS = {
    "single-turn": RolloutKind(program="single_turn", chat=False, max_model_len=PROMPT_TOKENS + MAX_RESPONSE_TOKENS),
    "program": RolloutKind(
        program=f"python:{HERE / 'program.py'}:rollout",
        chat=True,
        max_model_len=MAX_CHAT_TOKENS,
        settings=LIMITS,
        worker="async_rl.rollouts.agents.program_worker",
        spoil=SPOIL,
        max_turns=MAX_TURNS,
    ),
    "agent": RolloutKind(
        program=f"command:{sys.executable} -I -S {AGENT}",
        chat=True,
        max_model_len=MAX_CHAT_TOKENS,
        settings=LIMITS,
        worker=AGENT,
        spoil=SPOIL,
        max_turns=MAX_TURNS,
    ),
}
