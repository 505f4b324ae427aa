"""The generation thread: it starts, stands still, forgets and ends as it is told, and nobody waits for a dead one."""

import gc
import queue
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from async_rl.shared.protocol.inference import SamplingParams
from benchmarks.common.random_model import random_model
from inference_service.engine.batching import Batching
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.sequences import Sequence
from inference_service.engine_interface import EngineFault
from tests.support.tiny_model import FAMILIES, MODEL_SIZE
from tests.support.waiting import wait_for

WAIT_S = 60.0


class Recorder:
    """A `Batching`, and what it told."""

    def __init__(self, model: PreTrainedModel, max_concurrency: int = 4, max_model_len: int = 128) -> None:
        self.finished: queue.Queue[tuple[Sequence, str | None]] = queue.Queue()
        self.failed: list[Sequence] = []
        size = plan_cache(model.config, torch.float32, torch.device("cpu"), max_concurrency, max_model_len)
        self.batching = Batching(
            model,
            size,
            "processed_logprobs",
            lambda sampled: None,
            lambda ended: [self.finished.put(pair) for pair in ended] and None,
            self.failed.extend,
        )

    def next_finished(self) -> tuple[Sequence, str | None]:
        return self.finished.get(timeout=WAIT_S)


@pytest.fixture(params=["qwen3", "qwen3_5_text"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """With keys and values only, and with states beside them."""
    config_class, own = FAMILIES[request.param]
    return random_model(config_class(**{**own, **MODEL_SIZE})).eval()


@pytest.fixture
def recorder(model: PreTrainedModel) -> Iterator[Recorder]:
    made = Recorder(model)
    made.batching.start()
    yield made
    made.batching.stop(WAIT_S)


def sequence(seed: int = 0, max_tokens: int = 20) -> Sequence:
    return Sequence((5, 6, 7), SamplingParams(max_tokens=max_tokens), seed, frozenset())


def test_all_finish_with_their_tokens(recorder: Recorder) -> None:
    sequences = [sequence(seed) for seed in range(9)]
    for each in sequences:
        recorder.batching.submit([each])
    assert {recorder.next_finished() for _ in sequences} == {(each, None) for each in sequences}
    assert {len(each.samples) for each in sequences} == {20}
    assert recorder.batching.num_sampled == 180 and recorder.batching.cache_usage > 0


def test_held_between_two_steps_and_emptied_it_goes_on_with_the_same_tokens(recorder: Recorder) -> None:
    undisturbed, disturbed = sequence(max_tokens=100), sequence(max_tokens=100)
    recorder.batching.submit([undisturbed])
    recorder.next_finished()
    recorder.batching.submit([disturbed])
    for _ in range(3):
        reached = len(disturbed.samples)
        wait_for(lambda reached=reached: len(disturbed.samples) > reached)
        recorder.batching.hold()
        reached = len(disturbed.samples)
        recorder.batching.empty_caches()
        time.sleep(0.02)
        assert len(disturbed.samples) == reached
        recorder.batching.release()
    assert recorder.next_finished() == (disturbed, None)
    assert [s.token_id for s in disturbed.samples] == [s.token_id for s in undisturbed.samples]


def test_emptied_caches_leave_no_memory(recorder: Recorder) -> None:
    """At once, without a collection of garbage: another program takes the device."""
    running = sequence(max_tokens=100)
    recorder.batching.submit([running, sequence(1, max_tokens=100)])
    wait_for(lambda: len(running.samples) > 3)
    recorder.batching.hold()
    shelves = list(recorder.batching._store._shelves.values())
    tensors = [weakref.ref(tensor) for shelf in shelves for tensor in (*shelf.keys, *shelf.values)]
    del shelves
    assert tensors and all(tensor() is not None for tensor in tensors)
    gc.disable()
    try:
        recorder.batching.empty_caches()
        assert [tensor() for tensor in tensors if tensor() is not None] == []
    finally:
        gc.enable()


def test_what_is_cancelled_gets_no_more_tokens_and_frees_its_place(recorder: Recorder) -> None:
    batching = recorder.batching
    cancelled = [sequence(seed, max_tokens=120) for seed in range(4)]
    batching.submit(cancelled)
    wait_for(lambda: all(each.samples for each in cancelled))
    batching.cancel(cancelled)
    counts = [len(each.samples) for each in cancelled]
    last = sequence(9)
    batching.submit([last])
    assert recorder.next_finished() == (last, None)
    assert [len(each.samples) for each in cancelled] == counts


def test_damaged_weights_end_what_meets_them_and_nothing_after_their_repair(
    recorder: Recorder, model: PreTrainedModel
) -> None:
    healthy = [parameter.detach().clone() for parameter in model.parameters()]
    batching = recorder.batching
    batching.hold()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    batching.release()
    doomed = [sequence(seed) for seed in range(3)]
    batching.submit(doomed)
    wait_for(lambda: len(recorder.failed) == 3)
    batching.hold()
    with torch.no_grad():
        for parameter, good in zip(model.parameters(), healthy, strict=True):
            parameter.copy_(good)
    batching.release()
    sound = sequence(5)
    batching.submit([sound])
    assert recorder.next_finished() == (sound, None) and recorder.failed == doomed


def beginning_with(shared: tuple[int, ...], length: int, token: int) -> Sequence:
    prompt = (*shared, *[token] * (length - len(shared)))
    return Sequence(prompt, SamplingParams(max_tokens=128 - length), 0, frozenset())


def test_prompts_that_share_their_beginnings_leave_room_for_each_other(model: PreTrainedModel) -> None:
    # Each shares more with the one before it than that one with its own, so the last one's chain is as long as chains
    # get; the segments of four such prompts fill the store of an instance that generates one response at once.
    recorder = Recorder(model, max_concurrency=1)
    recorder.batching.start()
    asked = [beginning_with((), 120, 5)]
    for i in range(1, 6):
        asked.append(beginning_with(asked[-1].prompt[: 40 + 5 * i], 120, 5 + i))
    for each in asked:
        recorder.batching.submit([each])
        assert recorder.next_finished() == (each, None)
    recorder.batching.stop(WAIT_S)
    alone = Recorder(model)
    alone.batching.start()
    for each in asked:
        twin = Sequence(each.prompt, each.params, each.seed, each.stop_ids)
        alone.batching.submit([twin])
        assert alone.next_finished() == (twin, None)
        assert [s.token_id for s in twin.samples] == [s.token_id for s in each.samples]
    alone.batching.stop(WAIT_S)


@pytest.mark.parametrize("max_model_len", [2, 3, 16, 31, 32, 33, 63, 64, 65, 66, 127, 129])
def test_one_response_of_any_length_has_room(model: PreTrainedModel, max_model_len: int) -> None:
    recorder = Recorder(model, max_concurrency=1, max_model_len=max_model_len)
    recorder.batching.start()
    for length in sorted({1, max_model_len // 2, max_model_len - 1}):
        params = SamplingParams(max_tokens=max_model_len - length)
        each = Sequence(tuple(2 + i % 90 for i in range(length)), params, 0, frozenset())
        recorder.batching.submit([each])
        assert recorder.next_finished() == (each, None)
    recorder.batching.stop(WAIT_S)


def test_when_the_thread_dies_everybody_is_told(
    recorder: Recorder, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(model.model, "forward", die)
    victim = sequence()
    recorder.batching.submit([victim])
    ended, error = recorder.next_finished()
    assert ended is victim and error is not None and "no more" in error
    assert recorder.batching.fault == error
    with pytest.raises(EngineFault, match="no more"):
        recorder.batching.submit([sequence()])
    recorder.batching.hold()
