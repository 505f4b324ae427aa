"""Peak FLOPS of devices by name, from their makers' data sheets, for the estimate of MFU.

Ascend: the white paper of Atlas 800T A2 has processors of 313 TFLOPS, the 910B3 of 20 cores, and of 376, the 910B2 of
24. torch_npu shows each die of a 910C (Atlas A3) as a device, of 376 TFLOPS (arXiv 2506.12708, by Huawei). For other
variants (910B1, 910B4, 910_938x and below) no figure of the maker's was found.
"""

import torch

_PEAKS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "Ascend910B2": 376e12,
    "Ascend910B3": 313e12,
    "Ascend910_939": 376e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bfloat16 products without sparsity, per second; the first name that the device's name contains counts."""


def peak_flops_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Of one device; None where it is not known: on a CPU, in another dtype, on a device that is not in the table."""
    if device.type == "cpu" or dtype != torch.bfloat16:
        return None
    return peak_of_name(str(torch.get_device_module(device).get_device_name(device)))


def peak_of_name(name: str) -> float | None:
    return next((peak for part, peak in _PEAKS.items() if part in name), None)
