"""A request while the engine works on it: its prompt, and one growing sequence per response."""

import asyncio
from dataclasses import dataclass, field

from async_rl.protocol import SamplingParams
from inference_service.engine import Choice, FinishReason, Sample


@dataclass(slots=True, eq=False)
class Sequence:
    """One response in the making.

    The engine's thread appends to `samples`; the event loop reads it, so each token is one append. `seed` and the
    number of samples fix the noise of the next token. `stop_ids` ends the response, EOS included unless ignored.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    samples: list[Sample] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def token_ids(self) -> list[int]:
        """Prompt and response so far: what has to be computed again after the cache was emptied."""
        return [*self.prompt, *(sample.token_id for sample in self.samples)]

    @property
    def remaining_tokens(self) -> int:
        return self.params.max_tokens - len(self.samples)

    def reached_stop(self) -> bool:
        return bool(self.samples) and self.samples[-1].token_id in self.stop_ids

    def choice(self) -> Choice:
        assert self.finish_reason is not None, "an unfinished sequence has no choice"
        samples = tuple(self.samples)
        last = samples[-1].token_id if samples else None
        own_stop = self.finish_reason == "stop" and last in self.params.stop_token_ids
        return Choice(samples, self.finish_reason, last if own_stop else None)


@dataclass(slots=True, eq=False)
class Request:
    """The responses of one prompt; `done` ends when the last of them has, or fails with the reason why not."""

    request_id: str
    sequences: list[Sequence]
    done: asyncio.Future[None]
    submitted: bool = False

    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def end_if_complete(self) -> None:
        if not self.done.done() and not self.unfinished():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
