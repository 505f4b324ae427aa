"""`import async_rl`: its names, and what importing it costs."""

import subprocess
import sys

import pytest

import async_rl

HEAVY = ("torch", "pydantic", "numpy", "asyncio", "rich")


def test_every_name_of_the_interface_is_there_and_no_other() -> None:
    assert all(getattr(async_rl, name) is not None for name in async_rl.__all__)
    assert {*async_rl.__all__} <= {*dir(async_rl)}
    with pytest.raises(AttributeError, match=r"no attribute 'trian': it has Config, Run"):
        _ = async_rl.trian  # type: ignore[attr-defined]


@pytest.mark.distributed
@pytest.mark.cold
def test_importing_it_loads_nothing_that_takes_long() -> None:
    """In processor time, which other processes do not change: 0.1 s is its limit, and a hundredth is what it takes."""
    code = (
        "import sys, time; begun = time.process_time(); import async_rl; spent = time.process_time() - begun; "
        f"print(spent, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.split(maxsplit=1)
    assert loaded.strip() == "[]" and float(seconds) < 0.1
