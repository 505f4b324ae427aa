"""A rank on a CPU starts without the compiler that it has no use for."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
compile = torch.compile
from trainer.devices import choose_device
choose_device("cpu")
from megatron.core.fusions.fused_bias_swiglu import swiglu
assert torch.compile is compile, "torch is as it was"
assert not hasattr(swiglu, "_torchdynamo_orig_callable")
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler was loaded"
"""


@pytest.mark.distributed
def test_choosing_the_cpu_loads_megatron_without_torchs_compiler() -> None:
    """In a process of its own: here Megatron is loaded already."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
