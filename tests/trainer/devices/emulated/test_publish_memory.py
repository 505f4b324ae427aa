"""What a publish between devices takes besides the weights is at most what the forecast says, at both ends; on the host
two buffers."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.checks.forecast import memory
from async_rl.checks.forecast.instance_memory import RECEIVED_MESSAGES
from async_rl.shared.weights import fingerprint, host_pieces, in_flight, messages
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.snapshot import SnapshotWriter
from async_rl.shared.weights.store import StoreServer
from async_rl.shared.weights.stream import WeightGroup
from tests.support.devices.emulated.process import on_emulated_npu

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SCALE = 512
"""By which all sizes are smaller than they are."""
SIZES = {
    in_flight: ("WINDOW_BYTES",),
    messages: ("DEVICE_BUCKET_BYTES",),
    fingerprint: ("SUMMED_BYTES", "BLOCK_WORDS"),
}
EMBEDDING, MATRIX = 1200 * 1024, 17 * 1024
MIXED = [((7, 613), torch.float32), ((), torch.bfloat16), ((0, 4), torch.float32), ((500,), torch.bfloat16)]
"""One of many pieces, one of a whole piece, and some of less."""
SPECS = [TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate([EMBEDDING, *[MATRIX] * 200, EMBEDDING])]


def share_of_forecast(number: int, publish: Callable[[WeightGroup, list[torch.Tensor]], str]) -> float:
    """The peak of a member that is alone in its group, over what so many messages and the fingerprint may take."""
    for module, names in SIZES.items():
        for name in names:
            setattr(module, name, getattr(module, name) // SCALE)
    npu: Any = torch.get_device_module("npu")
    group = WeightGroup(StoreServer("127.0.0.1", []).store(60), 0, 1, "hccl", 60, torch.device("npu", 0))
    weights = [torch.ones(spec.shape, dtype=torch.uint8, device="npu") for spec in SPECS]
    before = npu.memory_allocated()
    npu.reset_peak_memory_stats()
    assert publish(group, weights)
    message = memory.MESSAGE_BYTES["broadcast"] // SCALE
    limit = memory.messages_bytes(message, number, sum(spec.num_bytes for spec in SPECS), EMBEDDING)
    return float((npu.max_memory_allocated() - before) / (limit + memory.FINGERPRINT_BYTES // SCALE))


@on_emulated_npu
def test_a_sender_stays_within_the_forecast() -> None:
    def send(group: WeightGroup, weights: list[torch.Tensor]) -> str:
        return group.send(zip(SPECS, weights, strict=True), messages.DEVICE_BUCKET_BYTES)

    share = share_of_forecast(2, send)
    assert 0.3 < share <= 1, share


def receive(group: WeightGroup, weights: list[torch.Tensor], into: dict[str, torch.Tensor]) -> str:
    for own, (_, tensor) in zip(weights, group.receive(SPECS, messages.DEVICE_BUCKET_BYTES, into), strict=True):
        if not into:
            own.copy_(tensor)
    assert group.fingerprint is not None, "a stream has been received"
    return group.fingerprint


@on_emulated_npu
def test_an_embedded_engine_which_has_places_for_all_stays_within_the_forecast() -> None:
    def into_places(group: WeightGroup, weights: list[torch.Tensor]) -> str:
        return receive(group, weights, {spec.name: own for spec, own in zip(SPECS, weights, strict=True)})

    share = share_of_forecast(RECEIVED_MESSAGES["transformers"], into_places)
    assert 0.3 < share <= 1, share


@on_emulated_npu
def test_a_loader_that_holds_what_it_was_given_last_stays_within_the_forecast() -> None:
    share = share_of_forecast(RECEIVED_MESSAGES["vllm"], lambda group, weights: receive(group, weights, {}))
    assert 0.3 < share <= 1, share


@on_emulated_npu
def test_a_snapshot_of_a_devices_weights_passes_two_pinned_buffers_and_is_that_of_a_cpu() -> None:
    """Copies are late here: a piece that was used before its copy has ended would be another one."""
    host_pieces.PIECE_BYTES = 1000
    weights = [torch.randn(shape).to(dtype) for shape, dtype in MIXED]
    specs = [TensorSpec(f"t{i}", str(w.dtype).removeprefix("torch."), tuple(w.shape)) for i, w in enumerate(weights)]
    pinned: list[torch.Size] = []
    new = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        pinned.extend([torch.Size(size)] if options.get("pin_memory") else [])
        return new(*size, **options)

    torch.empty = counted
    written = {}
    with tempfile.TemporaryDirectory() as folder:
        for device in ("cpu", "npu"):
            writer = SnapshotWriter(Path(folder) / device, specs)
            sent = ((spec, weight.to(device).add(0)) for spec, weight in zip(specs, weights, strict=True))
            written[device] = (writer.write(sent), writer.commit().read_bytes())
    assert written["npu"] == written["cpu"]
    assert pinned == [torch.Size([1000])] * 2
