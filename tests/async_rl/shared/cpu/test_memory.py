"""A process that keeps freed memory does not get the same pages again and again."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, torch
from async_rl.shared.cpu.memory import keep_freed_memory
# Where the system gives huge pages without being asked, a large tensor costs few faults.
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
{call}
# glibc looks for room for a tensor and its alignment: the first ones do not fit where their like were.
for _ in range(12):
    torch.ones(20_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(20_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(call: str) -> int:
    """Of five tensors of 80 MB, one after the other."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(call=call)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    kept = page_faults("keep_freed_memory()")
    assert kept < 1000 < page_faults("")
