"""The state of a request in the engine: its prompt, and one growing sequence per response.

A streaming request has deltas, which `take_delta` returns once each: with a sequence's first token, after every
`stream_interval` more, and at its end.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from async_rl.shared.protocol.inference import SamplingParams
from inference_service.engine.stop_texts import StopTexts
from inference_service.engine_interface import Choice, FinishReason, Sample


@dataclass(slots=True, eq=False)
class Sequence:
    """One response that is being generated.

    The engine's thread appends to `samples`; the event loop reads it, so each token is one append. `seed` and
    `num_tokens` determine the noise of the next token. `stop_ids` end the response; they include EOS unless ignored.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    num_continued: int = 0
    """How many of the prompt's last tokens are the beginning of a response that is continued here."""
    stop_texts: StopTexts | None = None
    scores_prompt: bool = False
    prompt_samples: list[Sample] = field(default_factory=list)
    """The prompt's tokens but the first as they would have been sampled, if it `scores_prompt`."""
    samples: list[Sample] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    due_at: int | None = None
    """Number of samples at which the next delta is due; None if the sequence is not streamed, or all of it was sent."""
    num_sent: int = 0
    routes: npt.NDArray[Any] | None = None
    """Of prompt and response but its last token, when it has ended, if the request asks for them."""

    def token_ids(self) -> list[int]:
        """Prompt and response so far: the tokens to be computed again after the cache was emptied."""
        return [*self.prompt, *(sample.token_id for sample in self.samples)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response so far: the position of the next token."""
        return len(self.prompt) + len(self.samples)

    @property
    def remaining_tokens(self) -> int:
        return self.params.max_tokens - len(self.samples)

    def reached_stop(self) -> bool:
        return self._stops_at(len(self.samples))

    @property
    def natural_end(self) -> FinishReason | None:
        """How its last sample ends it, which becomes its `finish_reason` a moment later; None if it goes on."""
        if self.reached_stop():
            return "stop"
        return None if self.remaining_tokens else "length"

    @property
    def has_delta(self) -> bool:
        return self.due_at is not None and self._num_sendable() >= self.due_at

    def end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self.due_at is not None:
            self.due_at = 0

    def choice(self) -> Choice:
        """The whole response."""
        assert self.finish_reason is not None, "an unfinished sequence has no choice"
        return self._choice(0, len(self.samples))

    def take_delta(self) -> Choice:
        """The part that was not sent yet."""
        delta = self._choice(self.num_sent, self._num_sendable())
        self.num_sent += len(delta.samples)
        self.due_at = self.num_sent + (self.params.stream_interval or 1) if delta.finish_reason is None else None
        return delta

    def _num_sendable(self) -> int:
        """Number of samples that a stream may send: the last one of a response only together with its finish reason.

        The finish reason is set a moment after the token. A client that received only the token, and then lost the
        stream, would continue the response past its end.
        """
        num = len(self.samples)
        if self.finish_reason is not None or not num:
            return num
        return num - 1 if num >= self.params.max_tokens or self._stops_at(num) else num

    def _stops_at(self, num: int) -> bool:
        """Whether the last of the first `num` samples ends the response."""
        if not num:
            return False
        if self.samples[num - 1].token_id in self.stop_ids:
            return True
        if self.stop_texts is None or num < self.params.min_tokens:
            return False
        tail = [sample.token_id for sample in self.samples[max(0, num - self.stop_texts.num_tokens) : num]]
        num_before = min(self.stop_texts.num_tokens - len(tail), self.num_continued)
        return self.stop_texts.are_in([*self.prompt[len(self.prompt) - num_before :], *tail])

    def _choice(self, start: int, stop: int) -> Choice:
        reason = self.finish_reason
        samples = tuple(self.samples[start:stop])
        last = self.samples[-1].token_id if self.samples else None
        own_stop = reason == "stop" and last in self.params.stop_token_ids
        routes = self.routes if reason is not None else None
        return Choice(samples, reason, last if own_stop else None, routes, tuple(self.prompt_samples))


@dataclass(slots=True, eq=False)
class Request:
    """The responses of one prompt; `done` completes when all of them have ended, or fails with the error.

    With a `delta_ready` event the request streams: it is set when there are deltas to take, and when `done` completes.
    """

    request_id: str
    sequences: list[Sequence]
    done: asyncio.Future[None]
    delta_ready: asyncio.Event | None = None
    submitted: bool = False

    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def end_if_complete(self) -> None:
        if not self.done.done() and not self.unfinished():
            self.done.set_result(None)
            self._wake()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self._wake()

    def wake_if_news(self) -> None:
        if self.delta_ready is not None and any(sequence.has_delta for sequence in self.sequences):
            self.delta_ready.set()

    def take_delta(self) -> dict[int, Choice]:
        return {index: sequence.take_delta() for index, sequence in enumerate(self.sequences) if sequence.has_delta}

    def _wake(self) -> None:
        if self.delta_ready is not None:
            self.delta_ready.set()
