"""One rank of layouts on emulated NPUs: `tests.support.trainer.layout_worker` after MindSpeed, which comes first."""

import sys
from importlib import import_module
from pathlib import Path

from trainer.devices import choose_device

if __name__ == "__main__":
    device = choose_device("npu")
    # It imports Megatron.
    import_module("tests.support.trainer.layout_worker").main(Path(sys.argv[1]), Path(sys.argv[2]), device)
