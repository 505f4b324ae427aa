"""The answer to one generate request as it comes in: events to tokens, each checked before it counts.

Nothing is added to a draft that is not of the version asked for, comes twice, or follows on a gap.
"""

from collections.abc import AsyncIterator, Sequence
from typing import NotRequired, Protocol

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from async_rl.errors import InstanceError, StaleWeights
from async_rl.fleet.drafts import Draft
from async_rl.types import WeightSpan, WeightVersion

END_OF_EVENT = b"\n\n"
DONE = b"[DONE]"


# The fields that this side reads of the large answers, as plain dicts: a third of the time that models take.
class _Token(TypedDict):
    logprob: float


class _Logprobs(TypedDict):
    """Of the generate route (content) or of completions (token_logprobs)."""

    content: NotRequired[list[_Token] | None]
    token_logprobs: NotRequired[list[float]]


class _Span(TypedDict):
    version: str
    start: int
    end: int


class _Choice(TypedDict):
    index: int
    finish_reason: NotRequired[str | None]
    token_ids: NotRequired[list[int] | None]
    logprobs: NotRequired[_Logprobs | None]
    weight_versions: NotRequired[list[_Span] | None]


class _Event(TypedDict):
    choices: list[_Choice]


_EVENT = TypeAdapter(_Event)


class ByteStream(Protocol):
    """What is read of aiohttp's `StreamReader`."""

    def iter_any(self) -> AsyncIterator[bytes]: ...


async def event_payloads(content: ByteStream) -> AsyncIterator[bytes]:
    """The `data:` payloads of a stream of server-sent events, up to `[DONE]` or its end."""
    rest = b""
    async for data in content.iter_any():
        *events, rest = (rest + data).split(END_OF_EVENT)
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload == DONE:
                return
            if payload:
                yield payload


class Answer:
    """Fills the drafts of one request; choice i of the answer belongs to `drafts[i]`.

    `says_versions`: the answer itself says which weights made each token; otherwise its reader finds out.
    """

    def __init__(self, url: str, drafts: Sequence[Draft], version: WeightVersion, says_versions: bool) -> None:
        self._url = url
        self._drafts = drafts
        self._version = version
        self.says_versions = says_versions
        self._starts = [len(draft.token_ids) for draft in drafts]
        self._proven = list(self._starts)
        self.num_tokens = 0
        """Tokens that have come in."""

    def feed(self, payload: bytes) -> None:
        """Takes one event, or a whole answer that came at once.

        Raises:
            StaleWeights: it says that it sampled from other weights.
            InstanceError: it is not of this protocol, leaves something out, or says that the request was aborted.
        """
        try:
            event = _EVENT.validate_json(payload)
        except ValidationError as error:
            shown = payload[:300].decode(errors="replace")
            raise InstanceError(f"instance {self._url} answered something else than tokens: {shown}") from error
        for choice in event["choices"]:
            if not 0 <= choice["index"] < len(self._drafts):
                raise InstanceError(
                    f"instance {self._url} answered choice {choice['index']} of a request for {len(self._drafts)}"
                )
            self._add(choice)

    def vouch(self) -> None:
        """Counts what has no version yet as made by the one asked for.

        Either the server says so outside its answer, or the answer broke off: a server that reports versions with its
        last chunk only cannot say so any more. It was put in service with that version, and only a publish changes it;
        and the trainer's own log-probs of these tokens will be compared, as of all others.
        """
        for i, draft in enumerate(self._drafts):
            if len(draft.token_ids) > self._proven[i]:
                self._prove(i, [])

    def take_back_unproven(self) -> None:
        """Removes the tokens of which nothing said which weights made them."""
        for draft, proven in zip(self._drafts, self._proven, strict=True):
            draft.cut(proven)

    def require_complete(self) -> None:
        """Raises InstanceError unless every draft has come to its end."""
        for i, draft in enumerate(self._drafts):
            if draft.finish_reason is None:
                raise InstanceError(
                    f"{self._name(i)}: the answer ended after {len(draft.token_ids)} tokens, unfinished"
                )

    def _add(self, choice: _Choice) -> None:
        i = choice["index"]
        draft, spans = self._drafts[i], choice.get("weight_versions")
        token_ids = choice.get("token_ids") or []
        logprobs = _logprobs_of(choice)
        if len(token_ids) != len(logprobs):
            raise InstanceError(
                f"{self._name(i)}: {len(token_ids)} tokens with {len(logprobs)} log-probs, expected one for each"
            )
        if spans:
            self._require_version(i, spans)
            length = len(draft.token_ids) - self._starts[i]
            if spans[-1]["end"] <= length and token_ids:
                return  # it came before
            if spans[-1]["end"] != length + len(token_ids):
                draft.cut(self._proven[i])
                raise InstanceError(
                    f"{self._name(i)}: its weight_versions cover {spans[-1]['end']} tokens, but "
                    f"{length + len(token_ids)} came"
                )
        if draft.finish_reason is not None:
            raise InstanceError(f"{self._name(i)}: more tokens after its end ({draft.finish_reason!r})")
        draft.token_ids.extend(token_ids)
        draft.logprobs.extend(logprobs)
        self.num_tokens += len(token_ids)
        if spans:
            self._prove(i, spans)
        self._finish(i, choice.get("finish_reason"))

    def _finish(self, i: int, reason: str | None) -> None:
        if reason is None:
            return
        draft = self._drafts[i]
        if reason not in ("stop", "length"):
            raise InstanceError(f"{self._name(i)}: finish_reason is {reason!r}, expected 'stop' or 'length'")
        if not draft.token_ids:
            raise InstanceError(f"{self._name(i)}: it ended without a token")
        if self.says_versions and self._proven[i] < len(draft.token_ids):
            self.take_back_unproven()
            raise InstanceError(
                f"{self._name(i)}: it ended without weight_versions: the server must be one that reports them"
            )
        draft.finish_reason, draft.instance = reason, self._url

    def _require_version(self, i: int, spans: Sequence[_Span]) -> None:
        others = {span["version"] for span in spans} - {self._version}
        if others:
            self.take_back_unproven()
            raise StaleWeights(
                f"{self._name(i)} was sampled from weight version {', '.join(sorted(others))!r}, asked for "
                f"{self._version!r}: the instance needs the weights of the next publish"
            )

    def _prove(self, i: int, spans: Sequence[_Span]) -> None:
        """Notes the version of the tokens that came in this answer, in the draft's own counting."""
        draft, start = self._drafts[i], self._starts[i]
        draft.spans = [span for span in draft.spans if span.end <= start]
        if spans:
            draft.spans += [WeightSpan(s["version"], start + s["start"], start + s["end"]) for s in spans]
        elif len(draft.token_ids) > start:
            draft.spans.append(WeightSpan(self._version, start, len(draft.token_ids)))
        self._proven[i] = len(draft.token_ids)

    def _name(self, i: int) -> str:
        return f"instance {self._url}, choice {i}"


def _logprobs_of(choice: _Choice) -> list[float]:
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return []
    if "token_logprobs" in logprobs:
        return logprobs["token_logprobs"]
    return [token["logprob"] for token in logprobs.get("content") or ()]
