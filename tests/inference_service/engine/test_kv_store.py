"""What lies in the store stays as it was put there, through every move; those in use come first."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.shared.model_parts import DeltaNet
from inference_service.engine.kv_store import MIN_CAPACITY, KVStore, NoRoom, Place, Shelf

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 3


DELTA = DeltaNet(1, 2, 3, 2, 3, frozenset({NUM_LAYERS, NUM_LAYERS + 1}))
STATE_TOKENS = 50


def make_store(max_tokens: int, *, has_states: bool = False) -> KVStore:
    states = {"delta": DELTA, "state_tokens": STATE_TOKENS} if has_states else {}
    num_layers = NUM_LAYERS + (len(DELTA.layers) if has_states else 0)
    return KVStore(num_layers, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"), max_tokens, **states)


def state_of(place: Place) -> list[torch.Tensor]:
    """Views of it; nothing of a model that has none."""
    if place.state is None:
        return []
    return [tensor[place.state.slot] for tensors in place.state.shelf.tensors for tensor in tensors]


def put(place: Place, start: int, rows: torch.Tensor) -> None:
    """`rows` is [layers, 2, K, tokens, D]."""
    for layer in range(NUM_LAYERS):
        for tensors, new in zip((place.shelf.keys, place.shelf.values), rows[layer], strict=True):
            tensors[layer][place.slot, :, start : start + rows.shape[3]] = new


def get(place: Place, length: int) -> torch.Tensor:
    shelf = place.shelf
    return torch.stack(
        [
            torch.stack([tensors[layer][place.slot, :, :length] for tensors in (shelf.keys, shelf.values)])
            for layer in range(NUM_LAYERS)
        ]
    )


@pytest.mark.computes
@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(300, 6000), st.booleans())
def test_contents_survive_any_order_of_operations(seed: int, max_tokens: int, has_states: bool) -> None:
    rng = random.Random(seed)
    store, state_tokens = make_store(max_tokens, has_states=has_states), STATE_TOKENS if has_states else 0
    contents: dict[Place, torch.Tensor] = {}
    states: dict[Place, list[torch.Tensor]] = {}
    shared: set[Place] = set()
    for _ in range(60):
        action = rng.choice(["new", "new", "grow", "grow", "append", "free", "use", "aside"])
        place = rng.choice(list(contents)) if contents else None
        before, length = store.generation, 0
        try:
            if action == "new" or place is None:
                length, is_shared = rng.randint(1, 200), rng.random() < 0.5
                place = store.new(length, is_shared)
                contents[place] = torch.empty(NUM_LAYERS, 2, NUM_KV_HEADS, 0, HEAD_DIM)
                assert not any(tensor.any() for tensor in state_of(place)), "a state begins with zeros"
                states[place] = [torch.randn_like(tensor) for tensor in state_of(place)]
                for tensor, made in zip(state_of(place), states[place], strict=True):
                    tensor.copy_(made)
                if is_shared:
                    shared.add(place)
                else:
                    store.use(place)
                length = rng.randint(0, length)
            elif action == "grow":
                length = contents[place].shape[3] + rng.randint(0, 90)
                store.reserve(place, length)
            elif action == "append":
                source = rng.choice(list(contents))
                begin, start = rng.randint(0, contents[source].shape[3]), contents[place].shape[3]
                rows = contents[source][:, :, :, begin:]
                length = start + rows.shape[3]
                store.append(place, start, source, range(begin, contents[source].shape[3]))
                contents[place] = torch.cat([contents[place], rows], dim=3)
                states[place], states[source] = states[source], states[place]
            elif action == "free":
                store.free(place)
                del contents[place], states[place]
                shared.discard(place)
                continue
            elif action == "use" and not place.is_in_use:
                store.use(place)
            elif action == "aside" and place in shared and place.is_in_use:
                store.put_aside(place)
        except NoRoom:
            capacity = max(MIN_CAPACITY, 1 << (length - 1).bit_length())
            assert sum(each.shelf.capacity + state_tokens for each in contents) + capacity + state_tokens > max_tokens
        else:
            if length > contents[place].shape[3]:
                added = torch.randn(NUM_LAYERS, 2, NUM_KV_HEADS, length - contents[place].shape[3], HEAD_DIM)
                put(place, contents[place].shape[3], added)
                contents[place] = torch.cat([contents[place], added], dim=3)
        assert store.generation >= before
        for each, expected in contents.items():
            torch.testing.assert_close(get(each, expected.shape[3]), expected, rtol=0, atol=0)
            assert each.shelf.places[each.slot] is each
        for each, expected_state in states.items():
            torch.testing.assert_close(state_of(each), expected_state, rtol=0, atol=0)
        assert store.num_tokens == sum(each.shelf.capacity + state_tokens for each in contents) <= max_tokens
        for shelf in {each.shelf for each in contents}:
            assert all(tensor.isfinite().all() for tensor in (*shelf.keys, *shelf.values))


def test_memory_of_small_segments_becomes_that_of_large_ones() -> None:
    store = make_store(16 * MIN_CAPACITY)
    places = [store.new(MIN_CAPACITY, is_shared=False) for _ in range(16)]
    with pytest.raises(NoRoom):
        store.new(1, is_shared=False)
    for place in places:
        store.free(place)
    assert store.new(16 * MIN_CAPACITY, is_shared=True).shelf.capacity == 16 * MIN_CAPACITY


def test_a_store_that_fills_up_is_not_copied_for_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shelves that took all that was left in turn had the whole store copied at each new segment."""
    num_copied = 0
    resize = Shelf.resize

    def counted(shelf: Shelf, num_slots: int) -> None:
        nonlocal num_copied
        num_copied += len(shelf.places)
        resize(shelf, num_slots)

    monkeypatch.setattr(Shelf, "resize", counted)
    store = make_store(1000 * MIN_CAPACITY)
    for i in range(1000):
        store.new(1, is_shared=i % 2 == 0)
    with pytest.raises(NoRoom):
        store.new(1, is_shared=True)
    assert num_copied <= 1000 * 20  # by the logarithm of their number; 78 each where a shelf takes all
