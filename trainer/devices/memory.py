"""Memory peaks of this rank since it began, for the records of steps."""

import resource

import torch

_UNIT_BYTES = 1024
"""Of `ru_maxrss` on Linux."""


def memory_peaks(device: torch.device) -> tuple[int, int | None]:
    """Bytes of host memory of this process, and of tensors on its device; None on a CPU, whose memory is the host's."""
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES
    if device.type == "cpu":
        return of_process, None
    return of_process, int(torch.get_device_module(device).max_memory_allocated(device))
