"""What a rollout program is: `async def rollout(prompt, policy)`, what it gets and what it may return.

    async def rollout(prompt, policy):
        turn = await policy.generate(messages=prompt.messages)
        return float(prompt.row["answer"] in turn.text)

A program is named in `rollout.program` and runs elsewhere than the trainer (`worker_programs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from async_rl.method.token_arrays import TokenIds
from async_rl.rollouts.agents.messages import Message, Tool
from async_rl.rollouts.agents.turn import Turn
from async_rl.rollouts.rewards.base import MAX_REWARD, as_float, is_reward

if TYPE_CHECKING:
    from async_rl.rollouts.agents.session import RolloutSession

SETTING = "rollout.program"

MAX_TURN_REWARDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPrompt:
    """The prompt of a rollout, as its program gets it.

    `row` is the row of the dataset and `messages` its conversation, None if the prompt is plain text; `token_ids` are
    the prompt's tokens. `seed` differs between the rollouts of a prompt, and is the same when a rollout is run again.
    Requests of OpenAI's clients, and of what builds on them, to `base_url` with `api_key` are turns of this rollout;
    both are empty where the gateway is missing.
    """

    prompt_id: str
    token_ids: TokenIds
    row: Mapping[str, Any] = field(repr=False)
    messages: Sequence[Message] | None = None
    seed: int = 0
    base_url: str = ""
    api_key: str = field(default="", repr=False)


class Policy(Protocol):
    """The weights in training, as a program sees them."""

    async def generate(
        self,
        messages: Sequence[Message] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Samples one turn: see `RolloutSession.generate`.

        Raises:
            LimitReached: the rollout has no turn, token or time left; what it has is trained.
            InvalidRequest: the request is malformed.
            SessionClosed: the rollout has ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What a rollout has earned; `reward` is None where `[reward]` scores it. `turn_rewards` are recorded only."""

    reward: float | None = None
    turn_rewards: tuple[float, ...] = ()

    @classmethod
    def of(cls, returned: object) -> "RolloutResult":
        """What a program returned: None, a number, or an object with `reward` and possibly `turn_rewards`.

        Raises:
            ValueError: it is something else, or a number that is not finite.
        """
        if returned is None:
            return cls()
        reward = getattr(returned, "reward", returned)
        # One more than the most is enough to detect too many: an iterator may never end.
        turn_rewards = tuple(islice(getattr(returned, "turn_rewards", None) or (), MAX_TURN_REWARDS + 1))
        if len(turn_rewards) > MAX_TURN_REWARDS:
            raise ValueError(f"it returned more than {MAX_TURN_REWARDS:,} turn_rewards: expected one for each turn")
        return cls(
            None if reward is None else _number(reward, "a reward"), tuple(_number(x, "a turn's") for x in turn_rewards)
        )


class ProgramFailed(Exception):
    """A run of a program failed, and may be repeated; the message continues after the name of its rollout."""


class ProgramInterrupted(Exception):
    """A run of a program was ended for a reason outside of it; it has to be repeated."""


class Program(Protocol):
    """Runs rollouts, many at once. All methods run on the producer's event loop."""

    async def start(self) -> None:
        """Prepares the first rollout; a second call does nothing.

        Raises:
            ConfigError: it cannot be loaded.
        """
        ...

    async def run(self, prompt: ProgramPrompt, session: "RolloutSession") -> RolloutResult:
        """One rollout, whose turns `session` records; ends within `rollout.options.timeout_s` and a short grace time.

        At that limit it calls `session.stop("time")`. A rollout that a limit has ended has a result, too.

        Raises:
            ProgramFailed, ProgramInterrupted: see there.
            AsyncRLError: the pool failed (`session.failed`).
        """
        ...

    async def close(self) -> None:
        """Ends what `start` and `run` started, within a few seconds whatever it does."""
        ...


def _number(value: Any, what: str) -> float:
    number = as_float(value)
    if not is_reward(number):
        raise ValueError(
            f"it returned {value!r:.200} as {what}: expected None or a finite number of at most {MAX_REWARD:g}, or "
            "an object with reward and turn_rewards"
        )
    return number
