"""A choice of `/v1/completions` told bit by bit is the one told at once."""

from collections.abc import Sequence
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.api.completion_choice import CompletionFormatter
from inference_service.api.requests import CompletionChoice, CompletionRequest
from inference_service.api.responses import LOWEST_LOGPROB
from inference_service.engine_interface import Choice, Sample


class Bytes:
    """A tokenizer with one token per byte of UTF-8; 256 is special."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = bytes(token for token in token_ids if token < 256).decode(errors="replace")
        return text if skip_special_tokens else text + "<end>" * list(token_ids).count(256)


def sampled(tokens: Sequence[int]) -> tuple[Sample, ...]:
    return tuple(Sample(token, -i / 4, 1, ((token, -i / 4, 1), (65, -9.0, 2)), "v") for i, token in enumerate(tokens))


def formatter(body: CompletionRequest, *, with_text: bool = True) -> CompletionFormatter:
    return CompletionFormatter(3, body, (1, 2), Bytes() if with_text else None)


@settings(max_examples=50)
@given(st.text(max_size=8), st.lists(st.integers(0, 30), max_size=4), st.booleans(), st.booleans())
def test_pieces_add_up_to_the_whole(text: str, cuts: list[int], as_token_ids: bool, with_text: bool) -> None:
    body = CompletionRequest.model_validate(
        {"prompt": "x", "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": as_token_ids}
    )
    tokens = [*text.encode(), 256]
    whole = formatter(body, with_text=with_text).format(Choice(sampled(tokens), "stop", None))
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    one = formatter(body, with_text=with_text)
    # The end comes with the last piece.
    pieces = [
        one.format(Choice(sampled(tokens)[a:b], "stop" if place == len(bounds) - 2 else None, None))
        for place, (a, b) in enumerate(pairwise(bounds))
    ]
    assert "".join(piece.text for piece in pieces) == whole.text == (text if with_text else "")
    assert [token for piece in pieces for token in piece.token_ids or []] == whole.token_ids == tokens
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert list(chain.from_iterable(getattr(piece.logprobs, name) for piece in pieces)) == getattr(
            whole.logprobs, name
        )
    assert [piece.prompt_token_ids for piece in pieces] == [[1, 2], *[None] * (len(pieces) - 1)]
    assert [piece.finish_reason for piece in pieces] == [*[None] * (len(pieces) - 1), "stop"]
    assert all(piece.index == 3 for piece in pieces)


def told(choice: Choice, *, with_text: bool = True, **body: object) -> CompletionChoice:
    request = CompletionRequest.model_validate({"prompt": "x", **body})
    return formatter(request, with_text=with_text).format(choice)


def test_only_what_was_asked_for_is_told() -> None:
    plain = told(Choice(sampled([72, 105, 256]), "stop", 256))
    assert (plain.text, plain.logprobs, plain.token_ids, plain.prompt_token_ids) == ("Hi", None, None, None)
    assert (plain.finish_reason, plain.stop_reason) == ("stop", 256)


@pytest.mark.parametrize(
    ("with_text", "body", "tokens", "offsets"),
    [
        (True, {}, ["H", "i", "<end>"], [0, 1, 2]),
        (True, {"return_tokens_as_token_ids": True}, ["token_id:72", "token_id:105", "token_id:256"], [0, 11, 23]),
        (False, {}, ["token_id:72", "token_id:105", "token_id:256"], [0, 11, 23]),
    ],
)
def test_tokens_are_named_by_their_text_or_by_their_ids(
    with_text: bool, body: dict[str, object], tokens: list[str], offsets: list[int]
) -> None:
    logprobs = told(Choice(sampled([72, 105, 256]), "stop", None), with_text=with_text, logprobs=1, **body).logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (tokens, offsets)


def test_a_token_without_top_ones_is_its_own_top_and_minus_infinity_is_a_number() -> None:
    bare = Sample(72, -0.5, 1, (), "v")
    impossible = Sample(105, -0.5, 1, ((105, -0.5, 1), (66, float("-inf"), 9)), "v")
    logprobs = told(Choice((bare, impossible), "length", None), logprobs=2).logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"H": -0.5}, {"i": -0.5, "B": LOWEST_LOGPROB}]
