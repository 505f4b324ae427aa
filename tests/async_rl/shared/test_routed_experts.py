"""Routes as vLLM writes them are read, and whatever else comes in their place is refused."""

import io

import numpy as np
import pytest

from async_rl.shared.protocol.routed_experts import RouteShape, from_npy, to_npy

SHAPE = RouteShape(num_layers=3, num_chosen=2, num_experts=8)


def saved(array: object, **options: bool) -> bytes:
    with io.BytesIO() as file:
        np.save(file, np.asarray(array), **options)
        return file.getvalue()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_the_array_of_a_server_is_read(dtype: str, num_rows: int) -> None:
    routes = np.random.default_rng().integers(0, 8, (num_rows, 3, 2)).astype(dtype)
    for data in (saved(routes), to_npy(routes), memoryview(to_npy(routes))):
        for shape in (SHAPE, None):
            read = from_npy(data, num_rows, shape)
            assert read.dtype == np.uint16 and np.array_equal(read, routes)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes are no routes"),
        (b"no array", "pickle"),
        (to_npy(np.zeros((4, 3, 2), "u1"))[:-1], "reshape|EOF|cannot"),
        (to_npy(np.zeros((3, 3, 2), "u1")), r"uint8 \[3, 3, 2\], expected integers \[4, 3, 2\]"),
        (to_npy(np.zeros((4, 2, 2), "u1")), r"expected integers \[4, 3, 2\]"),
        (to_npy(np.zeros((4, 6), "u1")), "expected integers"),
        (to_npy(np.zeros((4, 3, 2), "f4")), "routes of float32"),
        (to_npy(np.full((4, 3, 2), 8, "u1")), "experts 8 to 8, expected 0 to 7"),
        (to_npy(np.full((4, 3, 2), -1, "i4")), "experts -1 to -1"),
        (saved([[[{}, 1]] * 3] * 4, allow_pickle=True), "Object arrays"),
    ],
)
def test_what_is_none_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_npy(data, 4, SHAPE)


def test_more_than_256_experts_take_two_bytes() -> None:
    assert RouteShape(1, 1, 256).dtype == np.uint8 and RouteShape(1, 1, 257).dtype == np.uint16
