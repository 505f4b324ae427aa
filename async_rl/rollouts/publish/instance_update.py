"""The control calls that put new weights on one instance; the same for a publish and a late joiner.

    wake, where another program put it to sleep -> pause -> start -> update                   (`receive`)
    -> compare fingerprints -> finish with the version -> compare again what is in service
    -> resume -> read the version back                                                        (`put_in_service`)

One that sleeps while the trainer has its device (`run.placement = "turns"`) takes memory for the weights before the
start, and for keys and values after the end: they are never there beside what a loader needs.

Both run on the event loop and raise the `InstanceError` of the call that failed.
"""

import asyncio
import logging
from collections.abc import Sequence

from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable
from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.shared.protocol.inference import AdapterInfo, UpdateInfo
from async_rl.shared.protocol.sender import Content, SenderFacts

logger = logging.getLogger(__name__)

ANSWER_MARGIN_S = 5.0
"""How much longer than its own timeout an instance may take to respond: its error is more specific than ours."""


def announcement(facts: SenderFacts, content: Content) -> UpdateInfo:
    """The tensors of a stream, in its order, as announced to the instances."""
    if content == "whole":
        return UpdateInfo(names=facts.names, dtype_names=facts.dtype_names, shapes=facts.shapes, stages=facts.stages)
    adapter = facts.adapter
    assert adapter is not None, "these weights have no adapters that are published alone"
    info = AdapterInfo(rank=adapter.rank, alpha=adapter.alpha, base=adapter.base)
    dtype_names = ["float32"] * len(adapter.names)
    return UpdateInfo(names=adapter.names, dtype_names=dtype_names, shapes=adapter.shapes, adapter=info)


async def receive(client: InstanceClient, info: UpdateInfo, timeout_s: float, *, wakes: bool = False) -> None:
    """Lets the instance receive one stream. For a snapshot it has `timeout_s`; the sender bounds a broadcast."""
    if not wakes:
        await _awaken(client, timeout_s)
    await client.pause(timeout_s + ANSWER_MARGIN_S)
    if wakes:
        await client.wake_up("weights", timeout_s + ANSWER_MARGIN_S)
    refused = None
    try:
        await client.start_weight_update(timeout_s + ANSWER_MARGIN_S)
    except InstanceRefused as error:
        # An update left open by an earlier attempt or trainer may continue: this stream carries every tensor.
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


async def base_digest(client: InstanceClient, names: Sequence[str], timeout_s: float) -> str:
    """As `InstanceClient.base_digest`, of one that may have been put to sleep."""
    await _awaken(client, timeout_s)
    return await client.base_digest(names, timeout_s)


async def _awaken(client: InstanceClient, timeout_s: float) -> None:
    """Wakes an instance that sleeps though its trainer did not ask for that, or is paused, before weights come."""
    if not await client.is_sleeping(timeout_s):
        return
    logger.warning(
        "instance %s sleeps or is paused, as another program has asked for, or an update that ended early: it is woken",
        client.url,
    )
    await client.wake_up("weights", timeout_s + ANSWER_MARGIN_S)
    await client.wake_up("kv_cache", timeout_s + ANSWER_MARGIN_S)


async def _require_fingerprint(client: InstanceClient, has: str, fingerprint: str, timeout_s: float) -> None:
    """
    Raises:
        InstanceError: it has another one, or none.
    """
    found = await client.weight_fingerprints(timeout_s)
    if not found or set(found) != {fingerprint}:
        raise InstanceError(f"instance {client.url} {has} weights with fingerprints {found}, sent was {fingerprint!r}")


async def put_in_service(
    client: InstanceClient,
    fingerprint: str,
    version: WeightVersion,
    timeout_s: float,
    *,
    wakes: bool = False,
    has_adapters: bool = False,
) -> None:
    """Ends the update of an instance that received exactly the stream with this fingerprint.

    Args:
        has_adapters: it was one of adapters alone.
    """
    await _require_fingerprint(client, "received", fingerprint, timeout_s)
    await client.finish_weight_update(version, timeout_s)
    if has_adapters and not client.dialect.holds_what_it_received:
        await client.load_adapter(version, timeout_s)
    await _require_fingerprint(client, "computes with", fingerprint, timeout_s)
    if wakes:
        await client.wake_up("kv_cache", timeout_s)
    await client.resume(timeout_s)
    if (actual := await client.weight_version(timeout_s)) != version:
        raise InstanceError(f"instance {client.url} reports weight version {actual!r} after publishing {version!r}")
