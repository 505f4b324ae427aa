"""Peak FLOPS of devices by name, from their makers' data sheets, for the estimate of MFU."""

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
    "B200": 2250e12,
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
