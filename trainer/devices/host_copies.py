"""The copies between host and device while a window is trained: none to the device waits, and one from it does."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting; its memory may be dropped at once.

    A copy waits unless it is from pinned memory, which torch keeps until its copies have ended.
    """
    pinned = tensor if device.type == "cpu" else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the device, of one dtype, on the host, flattened, after one wait for all of them."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()
    return list(flat.split([tensor.numel() for tensor in tensors]))
