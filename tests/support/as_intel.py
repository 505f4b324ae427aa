"""`python -m tests.support.as_intel COMMAND...`: runs it as on a processor of Intel; for Linux, with a C compiler.

MKL asks functions of its own for the processor's maker and takes other kernels by the answer. These are exported by
torch's library, so one that is loaded before it can answer for them. /proc/cpuinfo, from which exact mode reads the
maker, is replaced for the command alone. What depends on features and not on the maker, as oneDNN, stays as it is here.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")

ANSWERS = "int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"


def kernels_for_intel(folder: Path) -> dict[str, str]:
    """The environment in which MKL takes them; what has to be loaded for that is compiled into `folder`."""
    library = folder / "as_intel.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=ANSWERS, text=True, check=True)
    return {"LD_PRELOAD": str(library)}


def main(command: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        cpu_info = Path(folder, "cpuinfo")
        cpu_info.write_text(re.sub(r"(?m)^(vendor_id\s*:).*", r"\1 GenuineIntel", CPU_INFO.read_text()))
        mount = f'mount --bind "{cpu_info}" {CPU_INFO} && exec "$@"'
        # Root of a namespace of users where it is not root already.
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        words = ["unshare", *as_root, "--mount", "sh", "-c", mount, "sh", *command]
        return subprocess.run(words, env=os.environ | kernels_for_intel(Path(folder))).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
