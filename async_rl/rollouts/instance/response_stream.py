"""The response to one generate request as it arrives: events or frames to tokens, each checked before it counts.

Tokens of another version, repeated ones and tokens after a gap are not added to a partial rollout.
"""

import time
from array import array
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from async_rl.errors import BrokenAnswer, InstanceError, InstanceRestarted, InstanceStalled, StaleWeights
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import WeightSpan, WeightVersion
from async_rl.rollouts.instance.answer_bytes import Span, event_of, logprobs_of
from async_rl.rollouts.instance.dialect import DEAD_ENGINE
from async_rl.rollouts.instance.model_tokens import SampledTokens
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.shared.protocol import token_frames
from async_rl.shared.protocol.body import ErrorResponse
from async_rl.shared.protocol.routed_experts import RouteShape, from_npy

MAX_SHOWN_BYTES = 300

BYTES_PER_TOKEN = 1024
"""JSON size of a token with its text, bytes and log-prob."""
BYTES_BESIDE_TOKENS = 2**20

LEAST_LOGPROB = -1e4
"""vLLM writes -9999 for minus infinity; no sampler draws a token this improbable."""
ROUNDING = 0.25
"""How far above 0 a log-prob may be where logits and their sum are rounded to bfloat16."""

OnProgress = Callable[[int, int], None]
"""Called after each event with the tokens and the finished responses of the whole response so far."""


Spans = Sequence[Span] | Sequence[token_frames.Span]


@dataclass(frozen=True, slots=True)
class ExpectedRoutes:
    """What routes must be like: those of `num_prompt` tokens of the prompt precede a response's. `shape`: if known."""

    num_prompt: int
    shape: RouteShape | None

    @property
    def bytes_per_row(self) -> int:
        """In JSON, at most; of an unknown model those of a large one."""
        return 2**13 if self.shape is None else 3 * self.shape.num_layers * self.shape.num_chosen


class ResponseStream:
    """Fills the partial rollouts of one request; choice i of the response belongs to `partials[i]`.

    `reports_versions`: the response itself reports which weights generated each token; otherwise its reader finds out.
    `max_tokens`: of a whole response, including the tokens received before this request. `tokens`: what they must be.
    `routes`: what those must be like that come with each response's end; None, if they were not asked for.
    """

    def __init__(
        self,
        url: str,
        partials: Sequence[PartialRollout],
        version: WeightVersion,
        reports_versions: bool,
        max_tokens: int,
        tokens: SampledTokens,
        expected_boot_id: str | None = None,
        on_progress: OnProgress | None = None,
        routes: ExpectedRoutes | None = None,
    ) -> None:
        self._url = url
        self._routes = routes
        self.partials = partials
        self.version = version
        self.reports_versions = reports_versions
        self._max_tokens = max_tokens
        self._tokens = tokens
        self._starts = [len(partial.token_ids) for partial in partials]
        self._proven = list(self._starts)
        self._on_progress = on_progress
        self._expected_boot_id = expected_boot_id
        self._made_by: str | None = None
        self.num_tokens = 0
        """Tokens received."""
        self.last_received_s = 0.0
        """`time.monotonic()` of the last of them; 0 before the first."""

    @property
    def max_bytes(self) -> int:
        """More than any server needs for this many tokens."""
        num_bytes = BYTES_PER_TOKEN * self._max_tokens
        if self._routes is not None:
            num_bytes += self._routes.bytes_per_row * (self._routes.num_prompt + self._max_tokens)
        return BYTES_BESIDE_TOKENS + num_bytes * len(self.partials)

    @property
    def boot_id(self) -> str | None:
        """Of the process that was put in service, if known."""
        return self._expected_boot_id

    @property
    def is_of_process_in_service(self) -> bool:
        """Whether the response itself names its process, and that is the one that was put in service."""
        return self._made_by is not None and self._made_by == self._expected_boot_id

    @property
    def has_unproven(self) -> bool:
        """Whether tokens were received for which no weight version is proven yet."""
        return any(len(partial.token_ids) > proven for partial, proven in zip(self.partials, self._proven, strict=True))

    def came_from(self, boot_id: str | None) -> None:
        """Notes which process responds, if the response names it.

        Raises:
            InstanceRestarted: it is not the process that was put in service.
        """
        self._made_by = boot_id
        if boot_id is not None and self._expected_boot_id not in (None, boot_id):
            raise InstanceRestarted(
                f"instance {self._url} was started anew: the process behind the address is {boot_id!r}, "
                f"{self._expected_boot_id!r} was put in service; it needs the weights of the next publish",
                boot_id,
            )

    def feed(self, payload: bytes) -> None:
        """Takes one event, or a whole response that arrived at once.

        Raises:
            StaleWeights: it reports tokens sampled from other weights.
            BrokenAnswer: a response is longer or shorter than it can be, a log-prob is not a number, or a token is none
                of the model's, follows the end, or is said to be the end and is none.
            InstanceError: it does not conform to the protocol, is incomplete, or reports that the request was aborted.
        """
        try:
            event = event_of(payload)
        except (ValueError, RecursionError) as error:
            raise self._fault(payload) from error
        for choice in event.choices:
            self._require_index(choice.index)
            token_ids: array[int] = array(TokenIds.typecode, choice.token_ids or ())
            logprobs: array[float] = array(Logprobs.typecode, logprobs_of(choice))
            self._note_routes(choice.index, choice.routed_experts, choice.finish_reason, len(token_ids))
            self._add(choice.index, token_ids, logprobs, choice.weight_versions, choice.finish_reason)
        self._report_progress()

    def feed_frame(self, payload: bytes) -> None:
        """Takes one frame of `async_rl.shared.protocol.token_frames`.

        Raises:
            As `feed`.
        """
        try:
            frame = token_frames.decode(payload)
        except (ValueError, RecursionError) as error:
            raise self._fault(payload) from error
        # Nearly always all is well with all tokens, which is found out at once.
        is_plain = self._tokens.are_plain(frame.token_ids) and _are_logprobs(frame.logprobs)
        begin = 0
        for choice in frame.choices:
            self._require_index(choice.index)
            end = begin + token_frames.VALUE_BYTES * choice.num_tokens
            new = frame.token_ids[begin:end], frame.logprobs[begin:end]
            begin = end
            self._note_routes(choice.index, choice.routed_experts, choice.finish_reason, choice.num_tokens)
            if is_plain and self._goes_on(choice):
                self._add_plain(choice, *new)
            else:
                token_ids: array[int] = array(TokenIds.typecode, new[0].tobytes())
                logprobs: array[float] = array(Logprobs.typecode, new[1].tobytes())
                self._add(choice.index, token_ids, logprobs, choice.weight_versions, choice.finish_reason)
        self._report_progress()

    def _note_routes(self, i: int, sent: str | memoryview | None, finish_reason: str | None, num_new: int) -> None:
        """Takes the routes that come with the end of a response, before its last tokens."""
        if self._routes is None or finish_reason not in ("stop", "length"):
            return
        if sent is None:
            raise InstanceError(
                f"{self._name(i)}: it ended without routed_experts, which train.router_replay needs: start vLLM "
                "(0.32 or later) with --enable-return-routed-experts"
            )
        partial = self.partials[i]
        num_rows = self._routes.num_prompt + len(partial.token_ids) + num_new - 1
        try:
            data = b64decode(sent, validate=True) if isinstance(sent, str) else sent
            partial.routes = from_npy(data, num_rows, self._routes.shape)
        except ValueError as error:
            raise self._broken(i, str(error)) from error

    def _goes_on(self, choice: token_frames.FramedChoice) -> bool:
        """Whether new tokens, fine each by itself, also follow what came before, all of it of the version."""
        partial, spans = self.partials[choice.index], choice.weight_versions
        if partial.finish_reason is not None or not choice.num_tokens or spans is None or len(spans) != 1:
            return False
        num_before, (span,) = len(partial.token_ids), spans
        return (
            span.version == self.version
            and span.start == 0
            and span.end == num_before - self._starts[choice.index] + choice.num_tokens
            and num_before + choice.num_tokens <= self._max_tokens
            and not self._tokens.has_ended(partial.token_ids)
        )

    def _add_plain(self, choice: token_frames.FramedChoice, token_ids: memoryview, logprobs: memoryview) -> None:
        """As `_add`, of tokens that need no check any more."""
        partial = self.partials[choice.index]
        partial.token_ids.frombytes(token_ids)
        partial.logprobs.frombytes(logprobs)
        self.num_tokens += choice.num_tokens
        self.last_received_s = time.monotonic()
        self._prove(choice.index, choice.weight_versions or ())
        self._finish(choice.index, choice.finish_reason)

    def _require_index(self, index: int) -> None:
        if not 0 <= index < len(self.partials):
            raise InstanceError(f"instance {self._url} answered choice {index} of a request for {len(self.partials)}")

    def _fault(self, payload: bytes) -> InstanceError:
        """The error that an event without tokens reports: the only way for a server to fail during its response."""
        try:
            info = ErrorResponse.model_validate_json(payload).error
        except ValidationError:
            shown = payload[:MAX_SHOWN_BYTES].decode(errors="replace")
            return InstanceError(f"instance {self._url} answered something else than tokens: {shown}")
        said = info.message[:MAX_SHOWN_BYTES]
        if DEAD_ENGINE in said:
            return InstanceStalled(f"the engine of instance {self._url} has died: {said}")
        return InstanceError(f"instance {self._url} broke its answer off: {said} ({info.type[:40]}, {info.code})")

    def confirm_version(self) -> None:
        """Counts tokens without a version as sampled from the requested one: the reader has verified that elsewhere."""
        for i, partial in enumerate(self.partials):
            if len(partial.token_ids) > self._proven[i]:
                self._prove(i, [])

    def take_back_unproven(self) -> None:
        """Removes the tokens whose weight version is not proven."""
        for partial, proven in zip(self.partials, self._proven, strict=True):
            partial.cut(proven)

    def require_complete(self) -> None:
        """Raises InstanceError unless every partial rollout is finished."""
        for i, partial in enumerate(self.partials):
            if partial.finish_reason is None:
                raise InstanceError(
                    f"{self._name(i)}: the answer ended after {len(partial.token_ids)} tokens, unfinished"
                )

    def _add(
        self,
        i: int,
        token_ids: "array[int]",
        logprobs: "array[float]",
        spans: Spans | None,
        finish_reason: str | None,
    ) -> None:
        partial = self.partials[i]
        if len(token_ids) != len(logprobs):
            raise InstanceError(
                f"{self._name(i)}: {len(token_ids)} tokens with {len(logprobs)} log-probs, expected one for each"
            )
        if spans:
            self._require_version(i, spans)
            length = len(partial.token_ids) - self._starts[i]
            if spans[-1].end <= length and token_ids:
                return  # a repetition
            self._require_cover(i, spans, length + len(token_ids))
        if partial.finish_reason is not None:
            raise InstanceError(f"{self._name(i)}: more tokens after its end ({partial.finish_reason!r})")
        if len(partial.token_ids) + len(token_ids) > self._max_tokens:
            raise self._broken(i, f"more than the {self._max_tokens} tokens asked for")
        if not _are_logprobs(logprobs):
            raise self._broken(i, f"log-probs that no token has, {min(logprobs):g} to {max(logprobs):g}")
        if (fault := self._tokens.fault_of(partial.token_ids[-1:], token_ids)) is not None:
            raise self._broken(i, fault)
        partial.token_ids.extend(token_ids)
        partial.logprobs.extend(logprobs)
        self.num_tokens += len(token_ids)
        if token_ids:
            self.last_received_s = time.monotonic()
        if spans:
            self._prove(i, spans)
        self._finish(i, finish_reason)

    def _finish(self, i: int, reason: str | None) -> None:
        if reason is None:
            return
        partial = self.partials[i]
        if reason not in ("stop", "length"):
            raise InstanceError(f"{self._name(i)}: finish_reason is {reason!r}, expected 'stop' or 'length'")
        if len(partial.token_ids) == self._starts[i]:
            raise InstanceError(f"{self._name(i)}: it ended without a token")
        if self.reports_versions and self._proven[i] < len(partial.token_ids):
            self.take_back_unproven()
            raise InstanceError(
                f"{self._name(i)}: it ended without weight_versions: the server must be one that reports them"
            )
        if reason == "length" and len(partial.token_ids) < self._max_tokens:
            raise self._broken(
                i, f"finish_reason 'length' after {len(partial.token_ids)} of the {self._max_tokens} tokens asked for"
            )
        if reason == "stop" and (fault := self._tokens.fault_of_end(partial.token_ids)) is not None:
            raise self._broken(i, fault)
        partial.finish_reason, partial.instance = reason, self._url

    def _broken(self, i: int, what: str) -> BrokenAnswer:
        """The error for a response that is no valid sample of the request. None of it is kept: keeping the finished
        responses and sampling the others again would favour short ones."""
        self._proven = list(self._starts)
        self.take_back_unproven()
        return BrokenAnswer(f"{self._name(i)}: it came with {what}: the server does not do what it is asked to")

    def _require_version(self, i: int, spans: Spans) -> None:
        others = {span.version for span in spans} - {self.version}
        if others:
            self.take_back_unproven()
            raise StaleWeights(
                f"{self._name(i)} was sampled from weight version {', '.join(sorted(others))!r}, asked for "
                f"{self.version!r}: the instance needs the weights of the next publish"
            )

    def _require_cover(self, i: int, spans: Spans, num_tokens: int) -> None:
        """Raises InstanceError unless the spans follow one another from the answer's first token to its last."""
        if len(spans) == 1 and spans[0].start == 0 and spans[0].end == num_tokens:
            return
        bounds = [0, *(bound for span in spans for bound in (span.start, span.end)), num_tokens]
        if bounds[::2] != bounds[1::2] or bounds != sorted(bounds):
            self.partials[i].cut(self._proven[i])
            covered = ", ".join(f"{span.start}-{span.end}" for span in spans)
            raise InstanceError(f"{self._name(i)}: its weight_versions cover {covered}, but {num_tokens} tokens came")

    def _prove(self, i: int, spans: Spans) -> None:
        """Notes the version of the tokens received in this response, by their indices in the whole partial rollout."""
        partial, start = self.partials[i], self._starts[i]
        partial.spans = [span for span in partial.spans if span.end <= start] if start else []
        if spans:
            partial.spans += [WeightSpan(s.version, start + s.start, start + s.end) for s in spans]
        elif len(partial.token_ids) > start:
            partial.spans.append(WeightSpan(self.version, start, len(partial.token_ids)))
        self._proven[i] = len(partial.token_ids)

    def _report_progress(self) -> None:
        """Reports the total received so far."""
        if self._on_progress is not None:
            self._on_progress(self.num_tokens, sum(partial.finish_reason is not None for partial in self.partials))

    def _name(self, i: int) -> str:
        return f"instance {self._url}, choice {i}"


def _are_logprobs(values: "array[float] | memoryview") -> bool:
    logprob_N = np.frombuffer(values, np.float32)
    # Both are NaN if one of the values is.
    return not len(logprob_N) or bool(logprob_N.min() >= LEAST_LOGPROB and logprob_N.max() <= ROUNDING)
