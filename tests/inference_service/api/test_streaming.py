"""Streaming answers: together the chunks are the unary answer; aborts, pauses, faults and clients that go away."""

import itertools
import json
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from async_rl.shared.protocol import inference, token_frames
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

PROMPT = [5, 6, 7, 8, 9]
LONG = {"max_tokens": 240, "ignore_eos": True}
GENERATE = "/inference/v1/generate"


class Stream:
    """The events of one answer, read in a thread of its own; `error` is the body of an error event."""

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self._thread = threading.Thread(target=self._read, args=(client, path, body), daemon=True)
        self._thread.start()

    def _read(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        with client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            for line in filter(None, answer.iter_lines()):
                data = line.removeprefix("data: ")
                assert data != line and not self.is_done and self.error is None
                if data == "[DONE]":
                    self.is_done = True
                elif "error" in (chunk := json.loads(data)):
                    self.error = chunk["error"]
                else:
                    self.chunks.append(chunk)

    def wait(self) -> "Stream":
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "the stream did not end"
        return self

    def pieces(self, index: int) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def num_tokens(self) -> int:
        return sum(len(choice["token_ids"]) for chunk in self.chunks for choice in chunk["choices"])


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def body_of(**params: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"logprobs": 0, "seed": 7, **params}}


@contextmanager
def frozen_stream(instance: Any, **params: Any) -> Iterator[Stream]:
    """A stream whose generation is frozen by pause(keep) after its first chunks; resumes in the end."""
    stream = Stream(instance.client, GENERATE, body_of(**{**LONG, "n": 32, "stream_interval": 8, **params}))
    wait_for(lambda: len(stream.chunks) > 0)
    instance.client.post("/pause", params={"mode": "keep"}).raise_for_status()
    try:
        yield stream
    finally:
        instance.client.post("/resume")


@pytest.mark.parametrize("interval", [1, 4, 1000, None])
def test_chunks_add_up_to_the_unary_answer(instance: Any, interval: int | None) -> None:
    params = {"n": 5, "max_tokens": 30, "logprobs": 2}
    whole = instance.generate(PROMPT, seed=7, **params)["choices"]
    stream = Stream(instance.client, GENERATE, body_of(**params, stream_interval=interval)).wait()
    assert stream.is_done and len({chunk["request_id"] for chunk in stream.chunks}) == 1
    for choice in whole:
        pieces = stream.pieces(choice["index"])
        assert joined(piece["token_ids"] for piece in pieces) == choice["token_ids"]
        content = joined(piece["logprobs"]["content"] for piece in pieces)
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        # Rows may run beside others than before, which rounds differently.
        expected = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-5)
        assert all(len(entry["top_logprobs"]) >= 2 for entry in content)
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert pieces[-1]["stop_reason"] == choice["stop_reason"]


def test_frames_add_up_to_the_unary_answer(instance: Any) -> None:
    params = {"n": 5, "max_tokens": 30, "logprobs": 0}
    whole = instance.generate(PROMPT, seed=7, **params)["choices"]
    body = {**body_of(**params, stream_interval=4), "stream": True}
    with instance.client.stream("POST", GENERATE, json=body, headers={"Accept": token_frames.MEDIA_TYPE}) as answer:
        assert answer.headers["content-type"] == token_frames.MEDIA_TYPE
        rest = b"".join(answer.iter_bytes())
    token_ids: dict[int, array[int]] = defaultdict(lambda: array("i"))
    logprobs: dict[int, array[float]] = defaultdict(lambda: array("f"))
    ends: dict[int, str | None] = {}
    while rest != token_frames.END:
        (length,) = token_frames.LENGTH.unpack(rest[:4])
        frame, rest, begin = token_frames.decode(rest[4 : 4 + length]), rest[4 + length :], 0
        for choice in frame.choices:
            assert choice.weight_versions is not None
            piece, begin = slice(begin, begin + 4 * choice.num_tokens), begin + 4 * choice.num_tokens
            token_ids[choice.index].frombytes(frame.token_ids[piece])
            logprobs[choice.index].frombytes(frame.logprobs[piece])
            assert choice.weight_versions[-1].end == len(token_ids[choice.index])
            ends[choice.index] = choice.finish_reason
    for choice in whole:
        index = choice["index"]
        assert (token_ids[index].tolist(), ends[index]) == (choice["token_ids"], choice["finish_reason"])
        expected = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs[index].tolist() == pytest.approx(expected, abs=1e-5)


def test_who_asks_for_more_log_probs_gets_events_though_frames_were_welcome(instance: Any) -> None:
    body = {**body_of(max_tokens=2, logprobs=2), "stream": True}
    headers = {"Accept": f"{token_frames.MEDIA_TYPE}, text/event-stream"}
    answer = instance.client.post(GENERATE, json=body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.text.endswith("data: [DONE]\n\n")


def test_answers_and_chunks_are_the_protocols_bodies(instance: Any) -> None:
    whole = instance.generate(PROMPT, n=2, logprobs=2)
    assert inference.GenerateResponse.model_validate(whole).model_dump() == without_routes(whole)
    for chunk in Stream(instance.client, GENERATE, body_of(n=2, logprobs=2)).wait().chunks:
        assert inference.GenerateChunk.model_validate(chunk).model_dump() == without_routes(chunk)


def without_routes(body: dict[str, Any]) -> dict[str, Any]:
    """Routes of experts are there only where they were asked for."""
    return {**body, "choices": [{**choice, "routed_experts": None} for choice in body["choices"]]}


def test_every_chunk_has_the_versions_of_the_whole_output_so_far(instance: Any) -> None:
    stream = Stream(instance.client, GENERATE, body_of(**LONG, stream_interval=10)).wait()
    told = 0
    for piece in stream.pieces(0):
        told += len(piece["token_ids"])
        assert piece["weight_versions"] == [{"version": "default", "start": 0, "end": told}]
    assert told == 240


def test_a_chunk_has_at_least_an_interval_of_new_tokens_after_the_first(instance: Any) -> None:
    stream = Stream(instance.client, GENERATE, body_of(**LONG, n=3, stream_interval=16)).wait()
    for index in range(3):
        pieces = stream.pieces(index)
        assert len(pieces) > 2
        assert all(len(piece["token_ids"]) >= 16 for piece in pieces[1:-1])


def test_first_tokens_come_long_before_the_last(instance: Any) -> None:
    with frozen_stream(instance) as stream:
        assert 0 < stream.num_tokens() < 32 * 240
    assert stream.wait().num_tokens() == 32 * 240 and stream.is_done


def test_keep_freezes_a_stream_and_abort_ends_it(instance: Any) -> None:
    with frozen_stream(instance) as stream:
        instance.answer_others()
        made, frozen_at = instance.metric("vllm:generation_tokens_total"), stream.num_tokens()
        instance.answer_others()
        assert instance.metric("vllm:generation_tokens_total") == made
        assert stream.num_tokens() == frozen_at and not stream.is_done
        instance.client.post("/pause", params={"mode": "abort"}).raise_for_status()
        stream.wait()
    assert stream.is_done
    for index in range(32):
        last = stream.pieces(index)[-1]
        assert last["finish_reason"] == "abort"
        assert (
            sum(len(piece["token_ids"]) for piece in stream.pieces(index)) == last["weight_versions"][-1]["end"] < 240
        )


def test_abort_of_a_request_that_waits_ends_its_stream_without_tokens(instance: Any) -> None:
    instance.client.post("/pause").raise_for_status()
    stream = Stream(instance.client, GENERATE, {**body_of(n=2), "request_id": "streaming"})
    wait_for(lambda: instance.metric("vllm:num_requests_waiting") == 2)
    assert instance.post("/abort_requests", {"request_ids": ["streaming"]}) == {"status": "aborted", "aborted": 1}
    stream.wait()
    instance.post("/resume")
    assert stream.is_done
    for index in range(2):
        (piece,) = stream.pieces(index)
        assert (piece["finish_reason"], piece["token_ids"], piece["weight_versions"]) == ("abort", [], [])


def test_client_that_leaves_its_stream_cancels_the_request(instance: Any) -> None:
    before = instance.metric("vllm:generation_tokens_total")
    with (
        httpx.Client(base_url=instance.url) as client,
        client.stream("POST", GENERATE, json={**body_of(**LONG, n=64), "stream": True}) as answer,
    ):
        next(answer.iter_lines())
    wait_for(lambda: instance.metric("vllm:num_requests_running") == 0)
    assert instance.tokens_made_beside(40) == 40
    assert instance.metric("vllm:generation_tokens_total") < before + 64 * 240


def test_refusals_come_before_the_stream(instance: Any) -> None:
    for path, body in ((GENERATE, body_of(max_tokens=999)), ("/v1/completions", {"prompt": PROMPT, "max_tokens": 999})):
        answer = instance.client.post(path, json={**body, "stream": True})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


def test_a_fault_ends_a_stream_with_an_error_event(
    launch_instance: Callable[..., Any],
    tiny_model: Callable[..., Path],
    load_reference: Callable[[Path], torch.nn.Module],
    trainer_side: Any,
) -> None:
    broken = launch_instance(tiny_model("qwen3", seed=3))
    trainer = trainer_side([broken])
    with frozen_stream(broken) as stream:
        broken.post("/start_weight_update")
        tensors = trainer.stream(load_reference(tiny_model("qwen3", seed=3)))
        trainer.send(tensors[:1])
        broken.post("/finish_weight_update", {"weight_version": "half"}, 500)
        stream.wait()
    assert not stream.is_done and stream.error is not None
    assert stream.error["code"] == 503 and "not complete" in stream.error["message"]
    trainer.die()


def test_a_stream_goes_on_with_new_weights_and_says_so(
    launch_instance: Callable[..., Any],
    tiny_model: Callable[..., Path],
    load_reference: Callable[[Path], torch.nn.Module],
    trainer_side: Any,
) -> None:
    updated = launch_instance(tiny_model("qwen3", seed=4))
    trainer = trainer_side([updated])
    stream = Stream(updated.client, GENERATE, body_of(**LONG, n=16, stream_interval=8))
    wait_for(lambda: len(stream.chunks) > 0)
    trainer.publish(load_reference(tiny_model("qwen3", seed=5)), "v1")
    stream.wait()
    trainer.die()
    for index in range(16):
        old, new = stream.pieces(index)[-1]["weight_versions"]
        assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "v1", 240)
        assert old["end"] == new["start"]


def test_completions_stream_the_text_tokens_and_logprobs_of_the_unary_answer(instance: Any) -> None:
    body = {
        "model": "tiny",
        "prompt": ["To be, or ", "not"],
        "n": 3,
        "max_tokens": 25,
        "seed": 5,
        "logprobs": 1,
        "return_token_ids": True,
        "stream_interval": 4,
    }
    whole = instance.client.post("/v1/completions", json=body).json()
    stream = Stream(instance.client, "/v1/completions", body).wait()
    assert stream.is_done and {chunk["id"][:5] for chunk in stream.chunks} == {"cmpl-"}
    for choice in whole["choices"]:
        pieces = stream.pieces(choice["index"])
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert joined(piece["logprobs"][name] for piece in pieces) == choice["logprobs"][name]
        assert joined(piece["token_ids"] for piece in pieces) == choice["token_ids"]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any(piece["prompt_token_ids"] for piece in pieces[1:])
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]


def test_streams_and_whole_answers_side_by_side_are_all_right(instance: Any) -> None:
    expected = [instance.generate(PROMPT, n=4, max_tokens=40, seed=10 * i)["choices"] for i in range(8)]
    streams = [
        Stream(instance.client, GENERATE, body_of(n=4, max_tokens=40, seed=10 * i, stream_interval=3)) for i in range(8)
    ]
    with ThreadPoolExecutor(8) as threads:
        again = list(threads.map(lambda i: instance.generate(PROMPT, n=4, max_tokens=40, seed=10 * i), range(8)))
    for choices, stream, answer in zip(expected, streams, again, strict=True):
        stream.wait()
        for choice, other in zip(choices, answer["choices"], strict=True):
            assert other["token_ids"] == choice["token_ids"]
            tokens = joined(piece["token_ids"] for piece in stream.pieces(choice["index"]))
            assert tokens == choice["token_ids"]
