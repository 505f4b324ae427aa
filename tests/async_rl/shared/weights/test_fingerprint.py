"""What a stream's fingerprint sees, on the host and on a device; that of a device against exact integers."""

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import xxhash

from async_rl.shared.weights.fingerprint import BLOCK_WORDS, DeviceFingerprint, Fingerprint, TensorSpec
from tests.support.stream_receiver import make_tensors


@pytest.mark.parametrize(
    "changed",
    [
        lambda s, t: (TensorSpec("z", s.dtype_name, s.shape), t),
        lambda s, t: (s, t + 1e-3),
        lambda s, t: (TensorSpec(s.name, s.dtype_name, (3, 7)), t),
    ],
)
def test_the_fingerprint_sees_names_values_and_shapes(changed) -> None:  # type: ignore[no-untyped-def]
    spec, tensor = make_tensors()[0]
    first, second = Fingerprint(), Fingerprint()
    first.add(spec, tensor.contiguous().view(-1).view(torch.uint8))
    new_spec, new_tensor = changed(spec, tensor)
    second.add(new_spec, new_tensor.contiguous().view(-1).view(torch.uint8))
    assert first.hexdigest() != second.hexdigest()


def words_of(data: bytes) -> list[int]:
    padded = data + bytes(-len(data) % 4)
    return [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]


def multiplier(place: int) -> int:
    """splitmix64 of a place, made odd; https://prng.di.unimi.it/splitmix64.c."""
    whole = 2**64 - 1
    state = (place + 1) * 0x9E3779B97F4A7C15 & whole
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & whole
    state = (state ^ state >> 27) * 0x94D049BB133111EB & whole
    return (state ^ state >> 31) | 1


def digest(tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> str:
    fingerprint = DeviceFingerprint()
    for spec, tensor in tensors:
        fingerprint.add(spec, tensor.contiguous().view(-1).view(torch.uint8))
    return fingerprint.hexdigest()


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 4096, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS + 7])
def test_the_sums_on_a_device_are_those_of_exact_integers(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    words = words_of(data.tobytes())
    if len(words) > 5000:  # exact integers of Python take too long for all
        data[: 4 * (BLOCK_WORDS - 1000)] = 0
        words = words_of(data.tobytes())
    sums = []
    for row in range(2):
        total = 0
        for block in range(0, len(words), BLOCK_WORDS):
            own = enumerate(words[block : block + BLOCK_WORDS], row * BLOCK_WORDS)
            inner = sum(multiplier(place) * word for place, word in own if word)
            total += inner * multiplier(row * BLOCK_WORDS + block // BLOCK_WORDS)
        sums.append(total % 2**64)
    spec = TensorSpec("a", "uint8", (num_bytes,))
    expected = xxhash.xxh3_128(f"a|uint8|{spec.shape}|".encode())
    expected.update(struct.pack("<QQ", *sums))
    assert digest([(spec, torch.from_numpy(data))]) == expected.hexdigest()


def test_the_sums_on_a_device_see_each_changed_bit_swaps_and_names() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(40_000, generator=generator).split(20_000)
    first, second = (TensorSpec(name, "float32", (20_000,)) for name in "ab")
    seen = {digest([(first, a), (second, b)])}
    for place in (0, 1, 19_999):
        for bit in range(32):
            changed = a.clone()
            changed.view(torch.int32)[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            seen.add(digest([(first, changed), (second, b)]))
    assert len(seen) == 97
    swapped = a.clone()
    swapped[[3, 7]] = a[[7, 3]]
    two_signs = a.clone()
    two_signs[[5, 6]] *= -1
    seen |= {digest([(first, other), (second, b)]) for other in (swapped, two_signs, a.roll(1))}
    seen |= {digest([(first, b), (second, a)]), digest([(second, a), (first, b)]), digest([(first, a)])}
    assert len(seen) == 103


@pytest.mark.parametrize("summed_bytes", [64, 10_000])
def test_the_sums_on_a_device_do_not_depend_on_where_the_bytes_are(
    summed_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor may begin at any byte of a message, and a large one is summed without a copy of it."""
    monkeypatch.setattr("async_rl.shared.weights.fingerprint.SUMMED_BYTES", summed_bytes)
    sizes = (5, 256, 3, 63, 128, 1)
    generator = torch.Generator().manual_seed(0)
    message = torch.randint(256, (sum(sizes),), dtype=torch.uint8, generator=generator)
    specs = [TensorSpec(str(i), "uint8", (size,)) for i, size in enumerate(sizes)]
    parts = message.split(sizes)
    assert any(part.storage_offset() % 4 for part in parts)
    in_place = digest(list(zip(specs, parts, strict=True)))
    assert in_place == digest([(spec, part.clone()) for spec, part in zip(specs, parts, strict=True)])
