"""Answers fed without a server: whatever their bytes do, partials hold only tokens shown to be of the version.

Every answer is fed in both of its forms, as events of JSON and as frames of arrays.
"""

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.errors import (
    BrokenAnswer,
    InstanceError,
    InstanceRestarted,
    InstanceStalled,
    StaleWeights,
)
from async_rl.method.types import WeightSpan
from async_rl.rollouts.instance.dialect import DEAD_ENGINE
from async_rl.rollouts.instance.model_tokens import ModelTokens, SampledTokens
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.instance.response_stream import ExpectedRoutes, ResponseStream
from async_rl.shared.protocol import token_frames
from async_rl.shared.protocol.inference import SamplingParams
from async_rl.shared.protocol.routed_experts import RouteShape, to_npy

URL = "http://a:1"
VERSION = "v1"
MAX_TOKENS = 12
PREFIX = (5, 6, 7)
NUM_SCRIPTS = 150


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one choice; `end` counts the tokens of the answer up to its own last one."""

    choice: int
    tokens: tuple[int, ...]
    end: int
    version: str | None = VERSION
    finish_reason: str | None = None

    def payload(self, **changes: Any) -> bytes:
        """The event that carries it, as a server would write it; `changes` are of its choice."""
        content = [{"logprob": logprob_of(token)} for token in self.tokens]
        spans = None if self.version is None else [{"version": self.version, "start": 0, "end": self.end}]
        choice = {
            "index": self.choice,
            "finish_reason": self.finish_reason,
            "token_ids": list(self.tokens),
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        return json.dumps({"request_id": "r", "choices": [choice | changes]}).encode()


def logprob_of(token: int) -> float:
    return -token / 64


def partials_of(num: int, prefix: Sequence[int] = ()) -> list[PartialRollout]:
    partials = [PartialRollout(seed) for seed in range(num)]
    for partial in partials:
        partial.token_ids.extend(prefix)
        partial.logprobs.extend(logprob_of(token) for token in prefix)
        partial.spans = [WeightSpan(VERSION, 0, len(prefix))] if prefix else []
    return partials


def frame_of(event: bytes) -> bytes:
    """The payload of the frame that says what an event says; as it is where no frame can say that."""
    try:
        choices = json.loads(event)["choices"]
        framed, token_ids, logprobs = [], array("i"), array("f")
        for choice in choices:
            own = array("i", choice["token_ids"])
            own_logprobs = array("f", [token["logprob"] for token in choice["logprobs"]["content"]])
            assert len(own) == len(own_logprobs)
            spans = choice["weight_versions"] and [token_frames.Span(**span) for span in choice["weight_versions"]]
            routes = choice.get("routed_experts")
            routes = None if routes is None else memoryview(b64decode(routes, validate=True))
            framed.append(token_frames.FramedChoice(choice["index"], len(own), choice["finish_reason"], spans, routes))
            token_ids += own
            logprobs += own_logprobs
        return token_frames.encode(token_frames.Frame(framed, memoryview(token_ids), memoryview(logprobs)))
    except (ValueError, KeyError, TypeError, AssertionError, OverflowError, RecursionError):
        return event


class OfFrames(ResponseStream):
    """Gets its events as frames."""

    def feed(self, payload: bytes) -> None:
        frame = frame_of(payload)
        super().feed(payload) if frame is payload else self.feed_frame(frame)


@pytest.fixture(autouse=True, params=[ResponseStream, OfFrames], ids=["events", "frames"])
def form(request: pytest.FixtureRequest) -> type[ResponseStream]:
    """The class of `answer_to`'s answers."""
    Form.now = request.param
    return Form.now


class Form:
    now: type[ResponseStream] = ResponseStream


def answer_to(partials: Sequence[PartialRollout], **options: Any) -> ResponseStream:
    usual = {"reports_versions": True, "max_tokens": MAX_TOKENS, "tokens": SampledTokens(None, SamplingParams())}
    return Form.now(URL, partials, VERSION, **(usual | options))


# Routes


def routes_text(num_rows: int, first: int = 0) -> str:
    routes = (np.arange(num_rows * 2 * 3).reshape(num_rows, 2, 3) + first) % 8
    return b64encode(to_npy(routes.astype(np.uint8))).decode()


def test_routes_come_with_the_end_and_cover_the_prompt_and_what_was_there_before() -> None:
    expected = ExpectedRoutes(num_prompt=4, shape=RouteShape(2, 3, 8))
    first, continued = partials_of(1)[0], partials_of(1, PREFIX)[0]
    for partial, before in ((first, 0), (continued, len(PREFIX))):
        answer = answer_to([partial], routes=expected)
        answer.feed(Piece(0, (10, 11), 2).payload())
        assert partial.routes is None
        answer.feed(Piece(0, (12,), 3, finish_reason="stop").payload(routed_experts=routes_text(4 + before + 3 - 1)))
        answer.require_complete()
        alone, with_prompt = partial.response(), partial.response(has_prompt_routes=True)
        assert alone.prompt_routes is None and alone.routes == with_prompt.routes
        assert [*(with_prompt.prompt_routes or ()), *(with_prompt.routes or ())] == [
            value % 8 for value in range(6 * (4 + before + 2))
        ]
        assert len(with_prompt.prompt_routes or ()) == 6 * 4


def test_an_end_without_routes_names_the_option_of_the_server() -> None:
    (partial,) = partials_of(1)
    answer = answer_to([partial], routes=ExpectedRoutes(4, None))
    with pytest.raises(InstanceError, match=r"it ended without routed_experts, .* --enable-return-routed-experts"):
        answer.feed(Piece(0, (10,), 1, finish_reason="stop").payload())


@pytest.mark.parametrize("text", [routes_text(3), routes_text(5), b64encode(b"none").decode()])
def test_routes_of_other_rows_are_a_broken_answer(text: str) -> None:
    (partial,) = partials_of(1)
    answer = answer_to([partial], routes=ExpectedRoutes(4, RouteShape(2, 3, 8)))
    with pytest.raises(BrokenAnswer):
        answer.feed(Piece(0, (10,), 1, finish_reason="stop").payload(routed_experts=text))
    assert not partial.token_ids and partial.routes is None


# Frames to tokens


def hostile_frames() -> dict[str, bytes]:
    """Payloads of frames, by what is wrong with them."""
    good = frame_of(Piece(0, (10, 11), 2).payload())
    decoded = msgspec.msgpack.decode(good)
    (choice,) = decoded[0]

    def changed(at: int, value: Any) -> bytes:
        fields = [[choice], *decoded[1:]]
        fields[at] = value
        return msgspec.msgpack.encode(fields)

    def with_field(at: int, value: Any) -> bytes:
        return changed(0, [[*choice[:at], value, *choice[at + 1 :]]])

    return {
        "nothing": b"",
        "text": b"tokens",
        "cut": good[:-1],
        "more than a frame": good + b"\x00",
        "a dict": msgspec.msgpack.encode({"choices": []}),
        "no arrays": msgspec.msgpack.encode([[choice]]),
        "half a token": changed(1, decoded[1][:-1]),
        "a token less": changed(1, decoded[1][:-4]),
        "a log-prob more": changed(2, decoded[2] + bytes(4)),
        "text for tokens": changed(1, "12345678"),
        "numbers for tokens": changed(1, [10, 11]),
        "more tokens than it has": with_field(1, 3),
        "fewer tokens than it has": with_field(1, 1),
        "a negative number of tokens": with_field(1, -2),
        "a huge number of tokens": with_field(1, 2**31),
        "a number of tokens that is none": with_field(1, 2.5),
        "a choice that is text": with_field(0, "0"),
        "a choice of lists": changed(0, [[[[[]]]]]),
        "an end that is a number": with_field(2, 1),
        "spans that are text": with_field(3, "v1"),
        "a span without its end": with_field(3, [["v1", 0]]),
        "a version that is a number": with_field(3, [[1, 0, 2]]),
        "choices that add up": changed(0, [[0, 3, None, None], [1, -1, None, None]]),
    }


@pytest.mark.parametrize("form", [OfFrames], indirect=True)
@pytest.mark.parametrize("name", hostile_frames())
def test_what_is_no_frame_is_an_instance_error_and_adds_nothing(name: str) -> None:
    partials = partials_of(2)
    answer = answer_to(partials)
    answer.feed(Piece(1, (30,), 1).payload())
    with pytest.raises(InstanceError, match=f"instance {URL} answered something else than tokens: "):
        answer.feed_frame(hostile_frames()[name])
    assert [list(partial.token_ids) for partial in partials] == [[], [30]]


@pytest.mark.parametrize("form", [OfFrames], indirect=True)
def test_random_bytes_of_a_frame_never_do_more_than_end_an_answer() -> None:
    rng, good = Random(0), frame_of(Piece(0, (10, 11), 2).payload())
    for _ in range(2000):
        (partial,) = partials_of(1)
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            answer_to([partial], tokens=SampledTokens(MODEL, SamplingParams())).feed_frame(bytes(damaged))
        except InstanceError:
            assert not partial.token_ids
        assert all(0 <= token < MODEL.vocab_size for token in partial.token_ids)
        assert len(partial.token_ids) == len(partial.logprobs) <= 2


@pytest.mark.parametrize("form", [OfFrames], indirect=True)
@pytest.mark.parametrize("token", [-1, 60, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("num_ends", [1, 20])
def test_a_frame_with_a_token_of_no_model_leaves_nothing(token: int, num_ends: int) -> None:
    (partial,) = partials_of(1)
    sampling = SamplingParams(stop_token_ids=list(range(30, 30 + num_ends)))
    answer = answer_to([partial], tokens=SampledTokens(MODEL, sampling))
    answer.feed_frame(frame_of(Piece(0, (10,), 1).payload()))
    one = Piece(0, (11, 12), 3).payload()
    broken = frame_of(one).replace(array("i", [12]).tobytes(), array("i", [token]).tobytes())
    with pytest.raises(BrokenAnswer, match=f"token {token}, but the model's tokens are 0 to 59"):
        answer.feed_frame(broken)
    assert not partial.token_ids and not partial.logprobs


# Events to tokens


@dataclass(slots=True)
class Script:
    """A sound answer, what of it is sent, and what went wrong with that."""

    prefix: tuple[int, ...]
    responses: list[tuple[int, ...]]
    told_with_each: bool
    sent: list[Piece] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def script_of(rng: Random, faults: Sequence[str], told_with_each: bool | None = None) -> Script:
    """Choices cut into pieces that come in turns; then up to two of `faults` happen to the pieces."""
    prefix = PREFIX if rng.random() < 0.3 else ()
    num = 1 if prefix else rng.randint(1, 3)
    lengths = [rng.randint(1, MAX_TOKENS - len(prefix)) for _ in range(num)]
    responses = [tuple(range(20 * i + 10, 20 * i + 10 + length)) for i, length in enumerate(lengths)]
    is_told = rng.random() < 0.5 if told_with_each is None else told_with_each
    script = Script(prefix, responses, is_told)
    waiting = [pieces_of(rng, script, i) for i in range(num)]
    while any(waiting):
        script.sent.append(rng.choice([pieces for pieces in waiting if pieces]).pop(0))
    for fault in rng.choices(faults, k=rng.randint(0, 2)) if faults else ():
        if script.sent:
            script.faults.append(fault)
            FAULTS[fault](script.sent, rng.randrange(len(script.sent)))
    return script


def pieces_of(rng: Random, script: Script, i: int) -> list[Piece]:
    tokens = script.responses[i]
    bounds = sorted({0, len(tokens), *(rng.randint(0, len(tokens)) for _ in range(rng.randint(0, 3)))})
    is_full = len(script.prefix) + len(tokens) == MAX_TOKENS
    pieces = []
    for start, end in pairwise(bounds):
        is_last = end == len(tokens)
        version = VERSION if script.told_with_each or is_last else None
        reason = ("length" if is_full else "stop") if is_last else None
        pieces.append(Piece(i, tokens[start:end], end, version, reason))
    return pieces


def _swap(sent: list[Piece], at: int) -> None:
    sent[at], sent[-1] = sent[-1], sent[at]


def _replace(**changes: Any) -> Callable[[list[Piece], int], None]:
    def change(sent: list[Piece], at: int) -> None:
        sent[at] = replace(sent[at], **changes)

    return change


FAULTS: dict[str, Callable[[list[Piece], int], None]] = {
    "lost": lambda sent, at: sent.__delitem__(at),
    "twice": lambda sent, at: sent.insert(at, sent[at]),
    "late": lambda sent, at: sent.append(sent[at]),
    "swapped": _swap,
    "torn": lambda sent, at: sent.__delitem__(slice(at, None)),
    "foreign": _replace(version="v0"),
    "untold": _replace(version=None),
    "aborted": _replace(finish_reason="abort"),
    "early length": _replace(finish_reason="length"),
    "no such choice": _replace(choice=7),
}


def play(script: Script) -> tuple[list[PartialRollout], InstanceError | None]:
    """What is left in the partials once the answer is over, and how it ended; as its reader treats it."""
    partials = partials_of(len(script.responses), script.prefix)
    answer = answer_to(partials)
    error = None
    try:
        for piece in script.sent:
            answer.feed(piece.payload())
        answer.require_complete()
    except InstanceError as caught:
        error = caught
    answer.take_back_unproven()
    assert not answer.has_unproven
    return partials, error


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_to_a_response_partials_hold_a_proven_part_of_it_and_nothing_twice(fault: str) -> None:
    rng = Random(fault)
    for _ in range(NUM_SCRIPTS):
        script = script_of(rng, [fault, *FAULTS])
        partials, error = play(script)
        for partial, tokens in zip(partials, script.responses, strict=True):
            whole = [*script.prefix, *tokens]
            held = list(partial.token_ids)
            assert held == whole[: len(held)] and len(held) >= len(script.prefix), script
            assert list(partial.logprobs) == [logprob_of(token) for token in held], script
            proven = [place for span in partial.spans for place in range(span.start, span.end)]
            assert proven == list(range(len(held))) and {span.version for span in partial.spans} <= {VERSION}, script
            if partial.finish_reason is not None:
                assert held == whole and partial.response().weight_versions == {VERSION}, script
        if error is None:
            assert all(
                partial.finish_reason in ("stop", "length") and partial.instance == URL for partial in partials
            ), script


def test_a_sound_answer_is_taken_whole() -> None:
    rng = Random(0)
    for _ in range(NUM_SCRIPTS):
        script = script_of(rng, [])
        partials, error = play(script)
        assert error is None, script
        for partial, tokens in zip(partials, script.responses, strict=True):
            assert partial.response().token_ids == (*script.prefix, *tokens), script
            assert partial.finish_reason == ("length" if len(partial.token_ids) == MAX_TOKENS else "stop")


def test_a_piece_that_comes_again_counts_once() -> None:
    rng = Random(1)
    for _ in range(NUM_SCRIPTS):
        script = script_of(rng, ["twice", "late"], told_with_each=True)
        partials, error = play(script)
        assert error is None, script
        assert [list(d.token_ids) for d in partials] == [[*script.prefix, *tokens] for tokens in script.responses]


@pytest.mark.parametrize("told_with_each", [True, False])
def test_after_a_gap_stays_what_was_proven_before(told_with_each: bool) -> None:
    (partial,) = partials_of(1)
    answer = answer_to([partial])
    answer.feed(Piece(0, (10,), 1, VERSION if told_with_each else None).payload())
    with pytest.raises(InstanceError, match=rf"{URL}, choice 0: its weight_versions cover 0-3, but 2 tokens came"):
        answer.feed(Piece(0, (12,), 3, finish_reason="stop").payload())
    assert list(partial.token_ids) == ([10] if told_with_each else [])


def test_tokens_of_another_version_and_all_that_is_unproven_beside_them_go() -> None:
    partials = partials_of(3)
    answer = answer_to(partials)
    answer.feed(Piece(0, (10, 11), 2).payload())
    answer.feed(Piece(1, (20, 21), 2, None).payload())
    with pytest.raises(StaleWeights, match=rf"{URL}, choice 2 was sampled from weight version 'v0', asked for 'v1'"):
        answer.feed(Piece(2, (30,), 1, "v0").payload())
    assert [list(partial.token_ids) for partial in partials] == [[10, 11], [], []]


@pytest.mark.parametrize(
    "spans",
    [
        [(VERSION, 1, 3)],
        [(VERSION, 0, 1), (VERSION, 2, 3)],
        [(VERSION, 0, 2), (VERSION, 1, 3)],
        [(VERSION, 0, 5), (VERSION, 5, 3)],
        [(VERSION, -1, 3)],
        [(VERSION, 0, 2)],
        [(VERSION, 0, 4)],
        [(VERSION, 0, 2**70)],
    ],
    ids=str,
)
def test_spans_that_leave_tokens_out_or_count_them_twice_prove_nothing(spans: list[tuple[str, int, int]]) -> None:
    """vLLM begins them at the first token of which its engine named the version."""
    (partial,) = partials_of(1, PREFIX)
    told = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    with pytest.raises(InstanceError, match=r"its weight_versions cover .*, but 3 tokens came"):
        answer_to([partial]).feed(Piece(0, (10, 11, 12), 3).payload(weight_versions=told))
    assert tuple(partial.token_ids) == PREFIX and partial.spans == [WeightSpan(VERSION, 0, 3)]


BAD_PIECES = {
    "too many": (Piece(0, tuple(range(MAX_TOKENS - 2)), MAX_TOKENS - 2), "more than the 12 tokens asked for"),
    "length too early": (
        Piece(0, (10,), 1, finish_reason="length"),
        "finish_reason 'length' after 4 of the 12 tokens asked for",
    ),
}


@pytest.mark.parametrize(("piece", "message"), BAD_PIECES.values(), ids=BAD_PIECES)
def test_what_is_no_sample_of_the_request_leaves_nothing_of_the_answer(piece: Piece, message: str) -> None:
    """Not even of the choices that had come to their ends; what the partial held before stays."""
    (partial,) = partials_of(1, PREFIX)
    with pytest.raises(BrokenAnswer, match=message):
        answer_to([partial]).feed(piece.payload())
    assert tuple(partial.token_ids) == PREFIX and partial.finish_reason is None
    partials = partials_of(2)
    answer = answer_to(partials)
    answer.feed(Piece(1, (20,), 1, finish_reason="stop").payload())
    with pytest.raises(BrokenAnswer):
        answer.feed(Piece(0, tuple(range(MAX_TOKENS + 1)), MAX_TOKENS + 1).payload())
    assert all(len(d.token_ids) == len(d.logprobs) == len(d.spans) == 0 for d in partials)
    assert all(d.finish_reason is None for d in partials)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1e300, -10001.0, 0.26, 5.0])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("route", ["generate", "completions"])
def test_no_token_has_such_a_logprob(value: float, place: int, route: str) -> None:
    (partial,) = partials_of(1)
    values = [-1.0, -2.0, -3.0]
    values[place] = value
    content = [{"logprob": each} for each in values]
    logprobs = {"content": content} if route == "generate" else {"token_logprobs": values}
    with pytest.raises(BrokenAnswer, match="log-probs that no token has, "):
        answer_to([partial]).feed(Piece(0, (10, 11, 12), 3).payload(logprobs=logprobs))
    assert len(partial.token_ids) == len(partial.logprobs) == len(partial.spans) == 0


@pytest.mark.parametrize("values", [[0.25, -1e4, 0.0], [-9999.0, 0, -1]])
def test_logprobs_at_the_limits_of_rounding_count(values: list[float]) -> None:
    (partial,) = partials_of(1)
    answer_to([partial]).feed(Piece(0, (10, 11, 12), 3).payload(logprobs={"token_logprobs": values}))
    assert list(partial.logprobs) == values


@pytest.mark.parametrize("num_logprobs", [0, 2, 4])
def test_a_logprob_belongs_to_every_token(num_logprobs: int) -> None:
    (partial,) = partials_of(1)
    with pytest.raises(InstanceError, match=f"3 tokens with {num_logprobs} log-probs, expected one for each"):
        answer_to([partial]).feed(Piece(0, (1, 2, 3), 3).payload(logprobs={"token_logprobs": [-1.0] * num_logprobs}))
    assert len(partial.token_ids) == 0


@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 10**40, 1.5, "a", None])
def test_what_can_be_no_token_id_is_refused_with_the_whole_event(token: Any) -> None:
    (partial,) = partials_of(1)
    logprobs = {"token_logprobs": [-1.0, -1.0]}
    with pytest.raises(InstanceError, match="answered something else than tokens"):
        answer_to([partial]).feed(Piece(0, (), 2).payload(token_ids=[3, token], logprobs=logprobs))
    assert len(partial.token_ids) == len(partial.logprobs) == 0


@pytest.mark.parametrize("index", [-1, 2, 10**9])
def test_a_choice_that_was_not_asked_for_is_an_error(index: int) -> None:
    partials = partials_of(2)
    with pytest.raises(InstanceError, match=f"answered choice {index} of a request for 2"):
        answer_to(partials).feed(Piece(index, (1,), 1).payload())
    assert not any(partial.token_ids for partial in partials)


def test_tokens_after_the_end_are_an_error() -> None:
    (partial,) = partials_of(1)
    answer = answer_to([partial])
    answer.feed(Piece(0, (10,), 1, finish_reason="stop").payload())
    with pytest.raises(InstanceError, match=r"more tokens after its end \('stop'\)"):
        answer.feed(Piece(0, (11,), 2).payload())
    assert partial.response().token_ids == (10,)


MODEL = ModelTokens(60, (1,), lambda ids, skip: "".join("" if skip and i == 9 else chr(64 + i) for i in ids).strip())


def whole_in_pieces(tokens: tuple[int, ...], size: int, reason: str | None) -> list[Piece]:
    """The answer in pieces of so many tokens; the last one has the finish reason."""
    ends = [min(start + size, len(tokens)) for start in range(0, len(tokens), size)]
    return [
        Piece(0, tokens[end - 1 - (end - 1) % size : end], end, finish_reason=reason if end == len(tokens) else None)
        for end in ends
    ]


def read_of(pieces: Sequence[Piece], prefix: Sequence[int] = (), **sampling: Any) -> list[PartialRollout]:
    """What is kept of an answer of the model's to one response, whose request asked for this."""
    (partial,) = partials = partials_of(1, prefix)
    tokens = SampledTokens(MODEL, MODEL.completed(SamplingParams(**sampling)))
    answer = answer_to(partials, tokens=tokens)
    try:
        for piece in pieces:
            answer.feed(piece.payload())
    finally:
        if partial.finish_reason is None:
            assert tuple(partial.token_ids) == tuple(prefix)
    return partials


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [
        ((5, 6, 1), {}),
        ((5, 6, 7), {"stop_token_ids": [7]}),
        ((5, 6, 1), {"stop_token_ids": [7]}),
        ((5, 6, 7), {"stop": ["x", "FG"]}),
        ((5, 6, 9, 7), {"stop": ["FG"]}),  # 9 is a special token, without text for some servers
        ((5, 6, 9, 7), {"stop": ["FI"]}),
        ((5, 6, 7), {"stop": [" EFG"]}),  # a space that the text of the response alone lacks
    ],
)
@pytest.mark.parametrize("size", [1, 10])
def test_a_response_ends_with_a_token_or_a_text_that_ends_it(
    tokens: tuple[int, ...], sampling: dict[str, Any], size: int
) -> None:
    pieces = whole_in_pieces(tokens, size, "stop")
    (partial,) = read_of(pieces, **sampling)
    assert (tuple(partial.token_ids), partial.finish_reason) == (tokens, "stop")


@pytest.mark.parametrize(
    ("tokens", "reason", "sampling", "message"),
    [
        ((5, 6, 7), "stop", {}, "'stop' after token 7, though only these end a response: tokens 1"),
        ((5, 6, 7), "stop", {"stop": ["GH"]}, r"tokens 1, texts \['GH'\]"),
        ((5, 6, 1), "stop", {"ignore_eos": True}, "'stop' after token 1, though only these .* tokens none"),
        ((5, 1, 7, 1), "stop", {}, "tokens after 1, which ends a response"),
        ((5, 7, 6), None, {"stop_token_ids": [7]}, "tokens after 7, which ends a response"),
        ((5, 60, 1), "stop", {}, "token 60, but the model's tokens are 0 to 59"),
        ((5, 600), None, {}, "the model's tokens are 0 to 59"),
    ],
)
@pytest.mark.parametrize("prefix", [(), PREFIX])
@pytest.mark.parametrize("size", [1, 10])
def test_a_response_that_ends_where_nothing_ends_it_or_goes_on_past_its_end_is_broken(
    tokens: tuple[int, ...],
    reason: str | None,
    sampling: dict[str, Any],
    message: str,
    prefix: tuple[int, ...],
    size: int,
) -> None:
    pieces = whole_in_pieces(tokens, size, reason)
    if prefix and 7 in sampling.get("stop_token_ids", ()):
        prefix = prefix[:2]  # its last token would be the end
    with pytest.raises(BrokenAnswer, match=message):
        read_of(pieces, prefix, **sampling)


@pytest.mark.parametrize("prefix", [(), PREFIX])
def test_a_response_does_not_end_before_the_answers_first_token(prefix: tuple[int, ...]) -> None:
    """A prefix that is continued goes on by a token at least: cut off there, it would be no sample."""
    (partial,) = partials_of(1, prefix)
    with pytest.raises(InstanceError, match="it ended without a token"):
        answer_to([partial]).feed(Piece(0, (), 0, None, "stop").payload())
    assert partial.finish_reason is None and tuple(partial.token_ids) == prefix


@pytest.mark.parametrize("reason", ["abort", "error", "", "tool_calls"])
def test_an_end_of_another_kind_is_an_error_and_what_came_stays(reason: str) -> None:
    (partial,) = partials_of(1)
    with pytest.raises(InstanceError, match=f"finish_reason is '{reason}', expected 'stop' or 'length'"):
        answer_to([partial]).feed(Piece(0, (10,), 1, finish_reason=reason).payload())
    assert list(partial.token_ids) == [10] and partial.finish_reason is None


def test_an_end_without_versions_keeps_nothing_where_the_answer_has_to_tell_them() -> None:
    (partial,) = partials_of(1)
    ended = Piece(0, (10,), 1, None, "stop").payload()
    with pytest.raises(InstanceError, match="it ended without weight_versions"):
        answer_to([partial]).feed(ended)
    assert len(partial.token_ids) == 0
    answer = answer_to([partial], reports_versions=False)
    answer.feed(ended)
    assert answer.has_unproven
    answer.confirm_version()
    answer.confirm_version()
    assert not answer.has_unproven and partial.response().weight_spans == (WeightSpan(VERSION, 0, 1),)


def test_an_answer_that_stops_is_incomplete() -> None:
    partials = partials_of(2)
    answer = answer_to(partials)
    answer.feed(Piece(0, (10,), 1, finish_reason="stop").payload())
    answer.feed(Piece(1, (20, 21), 2).payload())
    with pytest.raises(InstanceError, match=f"{URL}, choice 1: the answer ended after 2 tokens, unfinished"):
        answer.require_complete()


def test_a_dead_engine_is_told_from_a_failed_request_and_what_came_before_stays() -> None:
    (partial,) = partials_of(1)
    answer = answer_to([partial])
    answer.feed(Piece(0, (10,), 1).payload())
    for message, kind in ((f"{DEAD_ENGINE}. See above.", InstanceStalled), ("out of memory", InstanceError)):
        body = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
        with pytest.raises(InstanceError, match=message) as caught:
            answer.feed(json.dumps(body).encode())
        assert type(caught.value) is kind
    assert list(partial.token_ids) == [10]


def test_any_other_bytes_are_an_instance_error_of_bounded_length() -> None:
    sound = Piece(0, (10, 11), 2).payload()
    rng = Random(2)
    payloads = [b"", b"null", b"[]", b'{"choices": null}', b"\xff" * 10**5, b"[" * 10**5, b'{"choices": [{}]}']
    payloads += [sound[: rng.randrange(len(sound))] for _ in range(NUM_SCRIPTS)]
    payloads += [rng.randbytes(rng.randrange(2000)) for _ in range(NUM_SCRIPTS)]
    for payload in payloads:
        (partial,) = partials_of(1)
        with pytest.raises(InstanceError) as caught:
            answer_to([partial]).feed(payload)
        assert len(str(caught.value)) < 1000 and len(partial.token_ids) == 0


@pytest.mark.parametrize(
    ("expected", "told", "is_refused", "is_proof"),
    [
        ("a", "a", False, True),
        ("a", None, False, False),
        ("a", "b", True, False),
        (None, "b", False, False),
        (None, None, False, False),
    ],
)
def test_the_head_of_an_answer_proves_its_process(
    expected: str | None, told: str | None, is_refused: bool, is_proof: bool
) -> None:
    answer = answer_to(partials_of(1), expected_boot_id=expected)
    if is_refused:
        with pytest.raises(InstanceRestarted, match=r"was started anew.*'b', 'a' was put in service") as caught:
            answer.came_from(told)
        assert caught.value.boot_id == told
    else:
        answer.came_from(told)
    assert answer.is_of_process_in_service == is_proof


def test_progress_is_told_in_all_and_only_tokens_are_heard() -> None:
    told: list[tuple[int, int]] = []
    answer = answer_to(partials_of(2), on_progress=lambda *counts: told.append(counts))
    answer.feed(b'{"choices": []}')
    assert answer.last_received_s == 0.0 and told == [(0, 0)]
    answer.feed(Piece(0, (10, 11), 2).payload())
    last_received_s = answer.last_received_s
    answer.feed(Piece(1, (20,), 1, finish_reason="stop").payload())
    answer.feed(Piece(1, (20,), 1, finish_reason="stop").payload())
    assert told == [(0, 0), (2, 0), (3, 1), (3, 1)] and answer.last_received_s >= last_received_s > 0.0
    assert answer.num_tokens == 3
