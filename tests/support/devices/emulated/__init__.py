"""An emulated NPU: programs run on it whole, with the placement rules of a device and the arithmetic of the CPU.

`emulated_npu.cpp` is the device and hccl, `build.py` compiles it once per machine, `torch_npu.py` and `mindspeed.py`
stand in for the distributions of that name, `environment.py` gives programs an environment in which they find them, and
`process.py` runs single tests there. What it shows and what it cannot: docs/devices.md.
"""
