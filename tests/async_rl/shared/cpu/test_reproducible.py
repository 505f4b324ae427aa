"""The kernels of exact mode on processors of other makers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.as_intel import kernels_for_intel

TIMEOUT_S = 280.0

CHECK = """
import os
import sys
from pathlib import Path
import torch
from async_rl.shared.cpu.reproducible import use_reproducible_products
torch.set_num_threads(1)
use_reproducible_products(Path(sys.argv[1]))
print("MKL_CBWR" in os.environ)
"""


def check(cpu_info: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    return subprocess.run(
        [sys.executable, "-c", CHECK, str(cpu_info)],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.distributed
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_kernels_for_processors_of_intel_are_chosen_and_others_refused(tmp_path: Path) -> None:
    variables = kernels_for_intel(tmp_path)
    # The maker that a process finds in /proc is that of this machine; MKL's is Intel.
    intel, other = tmp_path / "intel", tmp_path / "other"
    intel.write_text("vendor_id\t: GenuineIntel\n")
    other.write_text("vendor_id\t: AuthenticAMD\n")
    done = check(intel, **variables)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    refused = check(other, **variables)
    assert refused.returncode == 1
    assert "products of matrices whose elements do not depend on the shape" in refused.stderr, refused.stderr


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_choice_of_the_user_that_does_not_do_is_refused(tmp_path: Path) -> None:
    refused = check(tmp_path / "none", MKL_CBWR="COMPATIBLE")
    assert refused.returncode == 1 and "MKL_CBWR is 'COMPATIBLE'" in refused.stderr, refused.stderr
