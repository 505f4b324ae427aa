"""Which experts each token of a sequence was sent to, as both engines report them: the bytes of a `.npy` file.

The array is [rows, layers, k], with a row for each token of prompt and response but the last, which was not fed, and
the experts' numbers as uint8, or uint16 where there are more than 256. Layers without experts have zeros, or anything.
In JSON these bytes are a text in base64, vLLM's `routed_experts` (0.32, `--enable-return-routed-experts`).
"""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Of the routes of one row."""

    num_layers: int
    num_chosen: int
    num_experts: int

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """As an instance sends them."""
        return np.uint8 if self.num_experts <= 256 else np.uint16


def to_npy(routes: npt.NDArray[Any]) -> bytes:
    """The bytes of a `.npy` file."""
    with io.BytesIO() as file:
        np.save(file, routes, allow_pickle=False)
        return file.getvalue()


def from_npy(data: bytes | memoryview, num_rows: int, shape: RouteShape | None) -> npt.NDArray[np.uint16]:
    """Routes as they were sent, [num_rows, layers, k].

    Args:
        shape: what a row's must be; None, if the model is not known.

    Raises:
        ValueError: these are none, or of other rows, layers or experts.
    """
    try:
        with io.BytesIO(data) as file:
            routes = np.load(file, allow_pickle=False)
    except EOFError as error:
        raise ValueError(f"{len(data)} bytes are no routes") from error
    expected = (num_rows, *(routes.shape[1:] if shape is None else (shape.num_layers, shape.num_chosen)))
    if routes.ndim != 3 or routes.shape != expected or routes.dtype.kind not in "iu":
        raise ValueError(f"routes of {routes.dtype} {list(routes.shape)}, expected integers {list(expected)}")
    most = np.iinfo(np.int16).max if shape is None else shape.num_experts - 1
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) <= most:
        raise ValueError(f"routes to experts {routes.min()} to {routes.max()}, expected 0 to {most}")
    found: npt.NDArray[np.uint16] = routes.astype(np.uint16)
    return found
