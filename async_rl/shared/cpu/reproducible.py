"""Products of matrices whose elements do not depend on the shape, for exact mode; called before anything is computed.

MKL's kernels for processors of Intel depend on the number of rows, and divide long sums by the shape. Its strict mode
of conditional numerical reproducibility (oneMKL Developer Guide, "Obtaining Numerically Reproducible Results") has
others, which do not. On AMD's processors the usual kernels fulfil what exact mode needs, and are faster.
"""

import os
from pathlib import Path

import torch

from async_rl.errors import ConfigError
from async_rl.shared.cpu import exact

VARIABLE = "MKL_CBWR"
STRICT = "AVX2,STRICT"

_CPU_INFO = Path("/proc/cpuinfo")
_ROWS = 48
_COLUMNS = 128
_INNER = (20, 72, 200, 448)
"""Below and above what MKL adds up in one chain, multiples of a vector's elements and others."""


def use_reproducible_products(cpu_info: Path = _CPU_INFO) -> None:
    """Has MKL take its strict kernels if this is a processor of Intel, and checks what exact mode relies on.

    MKL reads its variable at its first computation in a process, of any kind, so this comes before that. Processes that
    are started later do not inherit the choice. A user's own choice stays.

    Raises:
        ConfigError: elements of products depend on the shape.
    """
    is_chosen_here = VARIABLE not in os.environ and _is_intel(cpu_info)
    if is_chosen_here:
        os.environ[VARIABLE] = STRICT
    try:
        differences = _differences()
    finally:
        if is_chosen_here:
            del os.environ[VARIABLE]
    if differences:
        raise ConfigError(
            f"exact mode (train.exact, --exact) needs products of matrices whose elements do not depend on the shape, "
            f"and on this processor they do ({differences[0]}; {VARIABLE} is {os.environ.get(VARIABLE)!r}): unset "
            f"{VARIABLE} if it is set, use another kind of processor, or set train.exact to false"
        )


def _is_intel(cpu_info: Path) -> bool:
    try:
        return "GenuineIntel" in cpu_info.read_text()
    except OSError:
        return False


def _differences() -> list[str]:
    """What is not as `exact.py` relies on, for some shapes."""
    found = []
    random = torch.Generator().manual_seed(0)
    for inner in _INNER:
        x, weight = torch.randn(_ROWS, inner, generator=random), torch.randn(_COLUMNS, inner, generator=random)
        whole = x @ weight.T
        for rows in range(exact.ROW_MULTIPLE, _ROWS, exact.ROW_MULTIPLE):
            if not torch.equal(x[:rows] @ weight.T, whole[:rows]):
                found.append(f"{rows} of {_ROWS} rows of {inner} numbers have another product")
        for columns in range(exact.COLUMN_MULTIPLE, _COLUMNS, exact.COLUMN_MULTIPLE):
            if not torch.equal(x @ weight[:columns].T, whole[:, :columns]):
                found.append(f"{columns} of {_COLUMNS} columns of {inner} numbers have another product")
    for few, many in ((exact.VECTOR, exact.STRAIGHT), (exact.STRAIGHT // 2, exact.STRAIGHT)):
        x, weight = torch.randn(_ROWS, few, generator=random), torch.randn(_COLUMNS, few, generator=random)
        padded = (torch.nn.functional.pad(part, (0, many - few)) for part in (x, weight))
        left, right = padded
        if not torch.equal(x @ weight.T, left @ right.T):
            found.append(f"{few} numbers, and {many} of which the last are 0, have another product")
    return found
