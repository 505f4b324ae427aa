"""Prompts are kept for later requests, but not all of them, and each place is given back."""

import torch

from inference_service.engine.kv_store import KVStore
from inference_service.engine.segments import MAX_IDLE, MIN_SHARED, Segments, chain

CPU = torch.device("cpu")


def test_only_the_last_prompts_are_kept_without_a_response() -> None:
    store = KVStore(1, 1, 2, torch.float32, CPU, 1_000_000)
    segments = Segments(store)
    prompts = [(i, *range(1000, 1010)) for i in range(3 * MAX_IDLE)]
    taken = [segments.acquire(prompt) for prompt in prompts]
    for segment in taken:
        segment.num_done = len(segment)
        segments.give_back(segment)
    assert store.num_tokens == MAX_IDLE * taken[0].place.shelf.capacity
    assert segments.acquire(prompts[-1]) is taken[-1] and segments.acquire(prompts[0]) is not taken[0]


def test_a_parent_stays_as_long_as_its_children() -> None:
    store = KVStore(1, 1, 2, torch.float32, CPU, 1_000_000)
    segments = Segments(store)
    system = tuple(range(MIN_SHARED))
    first = segments.acquire((*system, 70, 71))
    second = segments.acquire((*system, 80))
    assert list(chain(second)) == [second, first] and len(second) == 1
    for segment in (first, second):
        segment.num_done = len(segment)
        segments.give_back(segment)
    assert segments.evict() and segments.evict() and not segments.evict()
    assert store.num_tokens == 0


def test_what_was_not_computed_is_not_kept() -> None:
    store = KVStore(1, 1, 2, torch.float32, CPU, 1_000_000)
    segments = Segments(store)
    segments.give_back(segments.acquire(list(range(100))))
    assert store.num_tokens == 0 and not segments.unfinished()
