"""An environment for programs in which torch_npu and MindSpeed are installed, and the emulated NPUs are there."""

import os
import struct
from collections import Counter
from pathlib import Path

import torch

from tests.support import ROOT
from tests.support.devices.emulated.build import library

VERSION = torch.__version__.split("+")[0]
HERE = "tests.support.devices.emulated"
FILES = {
    "torch_npu/__init__.py": f"import sys\nfrom {HERE} import torch_npu\n"
    "torch_npu.__path__, torch_npu._autoload = __path__, lambda: None\nsys.modules[__name__] = torch_npu\n",
    "torch_npu/contrib/__init__.py": "",
    "torch_npu/contrib/transfer_to_npu.py": f"from {HERE} import mindspeed\nmindspeed.transfer_to_npu()\n",
    "mindspeed/__init__.py": "",
    "mindspeed/megatron_adaptor.py": f"from {HERE} import mindspeed\nmindspeed.adapt()\n",
    "sitecustomize.py": f"import {HERE}.embedded_engine\n",
    f"torch_npu-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {VERSION}\n",
    f"torch_npu-{VERSION}.dist-info/entry_points.txt": "[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
}


MINDSPEED = "MINDSPEED_SOURCE"
"""Names a checkout of Ascend/MindSpeed, branch core_r0.16.0, for the tests that take it."""


def emulated_environment(folder: Path, mindspeed: str | None = None, **variables: object) -> dict[str, str]:
    """Variables for programs on emulated NPUs; `folder` gets the packages, and the records of waits.

    Args:
        mindspeed: a checkout of the real one, which then takes the place of the stand-in.
        variables: of `torch_npu.py`, without their common prefix, as in `faults="oom:17"`.
    """
    site, records = folder / "site", folder / "records"
    files = FILES
    if mindspeed is not None:
        files = {name: text for name, text in FILES.items() if not name.startswith("mindspeed/")}
        files["sitecustomize.py"] += f"import {HERE}.unused_packages\n"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    records.mkdir(exist_ok=True)
    own = {"library": library(), "records": records, **variables}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [site, ROOT, *([mindspeed] if mindspeed else [])])),
        "OMP_NUM_THREADS": "1",
        **{f"EMULATED_NPU_{name.upper()}": str(value) for name, value in own.items()},
    }


def peaks_of_all(file: Path) -> list[int]:
    """Of each device, in bytes, what all processes had on it together at most; `file` is the variable `shared`."""
    return list(struct.unpack("16Q", file.read_bytes()[: 16 * 8]))


def recorded_waits(folder: Path, *functions: str) -> Counter[str]:
    """Kinds of all processes' waits inside all of these functions (qualified names' last parts), with their numbers."""
    kinds: Counter[str] = Counter()
    for file in (folder / "records").glob("*.waits"):
        for line in file.read_text().splitlines():
            kind, _, callers = line.partition(" at ")
            names = {caller.rpartition(".")[2] for caller in callers.split(" < ")}
            kinds[kind] += names.issuperset(functions)
    return +kinds


def recorded_races(folder: Path) -> list[str]:
    """Uses of memory that another stream wrote, without waiting for it, by any process, with the code of each."""
    files = (folder / "records").glob("*.waits")
    return [line for file in files for line in file.read_text().splitlines() if line.startswith("race in ")]
