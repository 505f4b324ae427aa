"""What a finished rollout is, before the G of them become a group; of a program made by `RolloutSession.finish`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from async_rl.method.types import Response, RolloutFacts, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One rollout: at least one response, and one more for each branch; every sampled token is labelled in one of them.

    `reward` is None where `[reward]` scores it. `last` is the response as a reward sees it: its text is that of the
    last turn. `num_faults` counts how often an instance failed one of its turns.
    """

    responses: tuple[Response, ...]
    reward: float | None
    turn_rewards: tuple[float, ...]
    status: Status
    num_turns: int
    last: Response
    num_faults: int = 0

    @classmethod
    def single_turn(cls, response: Response) -> "Trajectory":
        """The rollout that is one response, which `[reward]` scores."""
        status = RolloutFacts.single_turn(response).status
        return cls(responses=(response,), reward=None, turn_rewards=(), status=status, num_turns=1, last=response)

    @property
    def facts(self) -> RolloutFacts:
        return RolloutFacts(
            num_responses=len(self.responses),
            num_turns=self.num_turns,
            status=self.status,
            turn_rewards=self.turn_rewards,
        )

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all its turns."""
        return sum(response.num_sampled for response in self.responses)


def with_texts(
    responses: Sequence[Response], decode: Callable[[Sequence[Sequence[int]]], Sequence[str]]
) -> tuple[Response, ...]:
    """The responses with their texts, observed tokens included."""
    texts = decode([response.token_ids for response in responses])
    return tuple(replace(response, text=text) for response, text in zip(responses, texts, strict=True))
