"""Changes of weights: exact for any bits, as few bytes as there are of three ways, and named where they are none."""

import random

import pytest
import torch

from async_rl.errors import PublishError
from async_rl.shared.weights.changes import LastSent, apply, front, pack, unpack
from async_rl.shared.weights.fingerprint import TensorSpec
from tests.support.fresh_seed import fresh_seed

DTYPES = ("float32", "bfloat16", "float16", "float64", "uint8", "int64")


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def any_bits(dtype_name: str, *shape: int) -> torch.Tensor:
    """NaN, infinities and both zeros among them."""
    dtype = getattr(torch, dtype_name)
    numel = torch.Size(shape).numel()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def with_changed(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """Other bits in about this share of its values."""
    other, changed = any_bits(str(tensor.dtype).removeprefix("torch."), *tensor.shape), tensor.clone()
    chosen = torch.rand(tensor.shape) < share
    changed[chosen] = other[chosen]
    return changed


def encoded(last: LastSent, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    changed = [last.replace(spec_of(name, tensor), bytes_of(tensor)) for name, tensor in tensors.items()]
    numbers, parts = zip(*changed, strict=True)
    return torch.cat([front(numbers, torch.device("cpu")), *(part for some in parts for part in some)])


def sent_once(tensors: dict[str, torch.Tensor]) -> LastSent:
    last = LastSent()
    for name, tensor in tensors.items():
        last.keep(spec_of(name, tensor), bytes_of(tensor))
    return last


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.5, 1.0])
def test_a_receiver_has_the_very_bits_afterwards(share: float) -> None:
    rng = random.Random(fresh_seed())
    shapes = [(), (1,), (7, 3), (1023,), (64, 65), (rng.randint(1, 5000),)]
    before = {f"{name} {shape}": any_bits(name, *shape) for name in DTYPES for shape in shapes}
    last, held = sent_once(before), {name: tensor.clone() for name, tensor in before.items()}
    for _ in range(3):
        now = {name: with_changed(tensor, share) for name, tensor in held.items()}
        specs = [spec_of(name, tensor) for name, tensor in now.items()]
        data = encoded(last, now)
        assert [spec for spec, _ in apply(data, specs, held)] == specs
        for name, tensor in now.items():
            assert torch.equal(bytes_of(held[name]), bytes_of(tensor)), name
        if not share:
            assert len(data) == 4 * len(now)


@pytest.mark.parametrize(
    ("num_changed", "num_bytes"),
    [
        (0, 0),
        # Their number in the only block has 4 bytes, a place 2, a word 2.
        (1, 4 + 4 + 4),
        (100, 4 + 200 + 200),
        # A bit for each word is less.
        (1000, 10_000 // 8 + 2 + 2000),
        (9000, 10_000 // 8 + 2 + 18_000),
        # And here all are.
        (9900, 20_000),
        (10_000, 20_000),
    ],
)
def test_the_way_with_the_fewest_bytes_is_taken(num_changed: int, num_bytes: int) -> None:
    before = torch.zeros(10_000, dtype=torch.bfloat16)
    now = before.clone()
    now[torch.randperm(10_000)[:num_changed]] = 1.5
    assert len(encoded(sent_once({"w": before}), {"w": now})) == 4 + num_bytes


def test_one_that_was_never_sent_is_sent_whole_and_is_known_then() -> None:
    weight = any_bits("float32", 50)
    last, held = LastSent(), {"w": torch.zeros(50)}
    for num_bytes in (200, 0):
        data = encoded(last, {"w": weight})
        assert len(data) == 4 + num_bytes
        list(apply(data, [spec_of("w", weight)], held))
        assert torch.equal(bytes_of(held["w"]), bytes_of(weight))


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_what_is_no_stream_of_changes_is_named_or_at_least_written_within_the_tensors(share: float) -> None:
    rng = random.Random(fresh_seed())
    before = {"a": any_bits("bfloat16", 40, 5), "b": any_bits("float32", 63)}
    specs = [spec_of(name, tensor) for name, tensor in before.items()]
    good = encoded(sent_once(before), {name: with_changed(tensor, share) for name, tensor in before.items()})
    for cut in range(len(good)):
        with pytest.raises(PublishError, match="bytes: expected"):
            list(apply(good[:cut], specs, {name: tensor.clone() for name, tensor in before.items()}))
    with pytest.raises(PublishError, match="bytes: expected"):
        list(apply(torch.cat([good, good[:4]]), specs, {name: tensor.clone() for name, tensor in before.items()}))
    num_refused = 0
    for _ in range(500):
        bad = good.clone()
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(min(len(bad), rng.choice((8, 10**6))))] = rng.randrange(256)
        try:
            list(apply(bad, specs, {name: tensor.clone() for name, tensor in before.items()}))
        except PublishError:
            num_refused += 1
    assert num_refused > 50


def test_bits_are_packed_and_unpacked() -> None:
    for number in (0, 1, 7, 8, 9, 1000):
        bits = torch.rand(number) < 0.5
        packed = pack(bits)
        assert packed.dtype == torch.uint8 and len(packed) == -(-number // 8)
        assert torch.equal(unpack(packed, number), bits)
    assert pack(torch.tensor([True] + [False] * 8 + [True])).tolist() == [1, 2]
