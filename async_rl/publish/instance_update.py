"""The control calls that bring one instance to new weights; a publish and a late joiner make the same ones.

    pause -> start -> update                                (`receive`)
    -> compare fingerprints -> finish with the version -> resume -> read the version back     (`put_in_service`)

Both run on the event loop and raise the `InstanceError` that says which call failed.
"""

import asyncio
from collections.abc import Sequence

from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable
from async_rl.instance.client import InstanceClient
from async_rl.protocol.inference import UpdateInfo
from async_rl.types import WeightVersion
from async_rl.weights.stream import TensorSpec

ANSWER_MARGIN_S = 5.0
"""How much longer than its own timeout an instance may take to answer: its error tells more than our giving up."""


def announcement(specs: Sequence[TensorSpec]) -> UpdateInfo:
    """The tensors of a stream, in its order, as the instances are told of them."""
    return UpdateInfo(
        names=[spec.name for spec in specs],
        dtype_names=[spec.dtype_name for spec in specs],
        shapes=[list(spec.shape) for spec in specs],
    )


async def receive(client: InstanceClient, info: UpdateInfo, timeout_s: float) -> None:
    """Lets the instance take one stream. From a snapshot it has `timeout_s`; a broadcast is bounded by its sender."""
    await client.pause(timeout_s + ANSWER_MARGIN_S)
    refused = None
    try:
        await client.start_weight_update(timeout_s + ANSWER_MARGIN_S)
    except InstanceRefused as error:
        # An update that an earlier try or trainer left open may go on: this stream carries every tensor.
        refused = error
    try:
        async with asyncio.timeout(None if info.snapshot is None else timeout_s):
            await client.update_weights(info)
    except TimeoutError as error:
        raise InstanceUnreachable(
            f"instance {client.url} did not read the snapshot {info.snapshot} within {timeout_s:g} s "
            "(publish.timeout_s)"
        ) from error
    except InstanceError as error:
        raise error if refused is None else InstanceError(f"{error}; before that: {refused}") from refused


async def put_in_service(client: InstanceClient, fingerprint: str, version: WeightVersion, timeout_s: float) -> None:
    """Ends the update of an instance that received exactly the stream with this fingerprint."""
    received = await client.weight_fingerprints(timeout_s)
    if not received or set(received) != {fingerprint}:
        raise InstanceError(
            f"instance {client.url} received weights with fingerprints {received}, sent was {fingerprint!r}"
        )
    await client.finish_weight_update(version, timeout_s)
    await client.resume(timeout_s)
    if (actual := await client.weight_version(timeout_s)) != version:
        raise InstanceError(f"instance {client.url} reports weight version {actual!r} after publishing {version!r}")
