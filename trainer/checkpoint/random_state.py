"""The random states of a training rank, as JSON."""

import base64

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from trainer.parallel import Parallel

_HOST = "host"
_DEVICE = "device"
_TRACKED = "megatron:"


def random_state(parallel: Parallel) -> dict[str, str]:
    """All generators that a rank draws from: torch's on host and device, and those that Megatron keeps separately."""
    states = {_HOST: torch.get_rng_state()}
    if parallel.device.DEVICE.type != "cpu":
        states[_DEVICE] = torch.get_device_module(parallel.device.DEVICE).get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    states |= {_TRACKED + name: state for name, state in tracked.items()}
    return {name: base64.b64encode(state.cpu().numpy().tobytes()).decode() for name, state in states.items()}


def set_random_state(parallel: Parallel, encoded: dict[str, str]) -> None:
    """Restores what `random_state` returned on the rank with the same position in the layout."""
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8) for name, state in encoded.items()
    }
    torch.set_rng_state(states[_HOST])
    if _DEVICE in states and parallel.device.DEVICE.type != "cpu":
        torch.get_device_module(parallel.device.DEVICE).set_rng_state(states[_DEVICE])
    tracked = {name.removeprefix(_TRACKED): state for name, state in states.items() if name.startswith(_TRACKED)}
    get_cuda_rng_tracker().set_states(tracked)
