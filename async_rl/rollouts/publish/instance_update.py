"""The control calls that put new weights on one instance; the same for a publish and a late joiner.

    wake, where another program put it to sleep -> pause -> start -> update                   (`receive`)
    -> compare fingerprints -> finish with the version -> compare again what is in service
    -> resume -> read the version back                                                        (`put_in_service`)

Each of the two is one round trip, where the server carries out sequences of calls.

One that sleeps while the trainer has its device (`run.placement = "turns"`) takes memory for the weights before the
start, and for keys and values after the end: they are never there beside what a loader needs.

Both run on the event loop and raise the `InstanceError` of the call that failed.
"""

import asyncio
import logging
from collections.abc import Sequence

from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable
from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance import update_calls as calls
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.http import MAX_ERROR_CHARS
from async_rl.rollouts.pool.membership import BootId
from async_rl.shared.protocol.inference import AdapterInfo, UpdateInfo
from async_rl.shared.protocol.sender import Content, SenderFacts
from async_rl.shared.protocol.sequence import Call, goes_on, values_of

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
    steps = [calls.PAUSE, *([calls.wake_up("weights")] if wakes else []), calls.START, calls.update(info)]
    try:
        async with asyncio.timeout(None if info.snapshot is None else timeout_s):
            if wakes:
                answers, _ = await client.in_order(steps, None)
            else:
                (first, *answers), _ = await client.in_order([calls.IS_AWAKE, *steps], None)
                if not goes_on(calls.IS_AWAKE, first):
                    await _wake(client, timeout_s)
                    answers, _ = await client.in_order(steps, None)
    except TimeoutError as error:
        raise InstanceUnreachable(
            f"instance {client.url} did not read the snapshot {info.snapshot} within {timeout_s:g} s "
            "(publish.timeout_s)"
        ) from error
    refused = None
    for step, answer in zip(steps, answers, strict=False):
        try:
            client.require(step, answer)
        except InstanceError as error:
            if step is not calls.START or not isinstance(error, InstanceRefused):
                raise error if refused is None else InstanceError(f"{error}; before that: {refused}") from refused
            refused = error


async def base_digest(client: InstanceClient, names: Sequence[str], timeout_s: float) -> str:
    """As `InstanceClient.base_digest`, of one that may have been put to sleep."""
    if await client.is_sleeping(timeout_s):
        await _wake(client, timeout_s)
    return await client.base_digest(names, timeout_s)


async def _wake(client: InstanceClient, timeout_s: float) -> None:
    """Wakes an instance that sleeps though its trainer did not ask for that, or is paused, before weights come."""
    logger.warning(
        "instance %s sleeps or is paused, as another program has asked for, or an update that ended early: it is woken",
        client.url,
    )
    await client.wake_up("weights", timeout_s + ANSWER_MARGIN_S)
    await client.wake_up("kv_cache", timeout_s + ANSWER_MARGIN_S)


async def put_in_service(
    client: InstanceClient,
    fingerprint: str,
    version: WeightVersion,
    timeout_s: float,
    *,
    wakes: bool = False,
    has_adapters: bool = False,
) -> BootId:
    """Ends the update of an instance that received exactly the stream with this fingerprint, within `timeout_s`; where
    it loads adapters by itself, thrice that.

    Args:
        has_adapters: it was one of adapters alone.

    Returns:
        Of the process that holds the version, from the response that says so.

    Raises:
        InstanceError: it has another fingerprint, or none, or another version afterwards; or it fails a step.
    """
    proof = calls.has_fingerprint(fingerprint)
    begin = [proof, *calls.finish(client.dialect, version)]
    end = [
        proof,
        *([calls.wake_up("kv_cache")] if wakes else []),
        calls.RESUME,
        calls.has_version(client.dialect, version),
    ]

    async def carry_out(*parts: tuple[str, Sequence[Call]]) -> BootId:
        """Each part with what an instance did that has another fingerprint at its beginning."""
        steps = [(has, step) for has, part in parts for step in part]
        answers, boot_id = await client.in_order([step for _, step in steps], timeout_s)
        for (has, step), answer in zip(steps, answers, strict=False):
            client.require(step, answer)
            if not goes_on(step, answer):
                found = [str(value) for field in step.expected or {} for value in values_of(answer, field)]
                claims = f"{has} weights with fingerprints {found}, sent was {fingerprint!r}"
                if step is not proof:
                    actual = ", ".join(sorted(set(found)))
                    claims = f"reports weight version {actual!r} after publishing {version!r}"
                raise InstanceError(f"instance {client.url} {claims[:MAX_ERROR_CHARS]}")
        return boot_id

    if has_adapters and not client.dialect.holds_what_it_received:
        await carry_out(("received", begin))
        await client.load_adapter(version, timeout_s)
        return await carry_out(("computes with", end))
    return await carry_out(("received", begin), ("computes with", end))
