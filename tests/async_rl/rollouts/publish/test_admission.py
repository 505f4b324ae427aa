"""Why a late joiner has to wait for the next publish, and how it loads the weights in training otherwise."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from async_rl.config.pool_section import PublishSection
from async_rl.errors import InstanceError, InstanceUnreachable
from async_rl.rollouts.instance.dialect import EMBEDDED, VLLM, Dialect
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.admission import Admission, Offer
from async_rl.shared.protocol.inference import AdapterInfo, UpdateInfo
from tests.support.members import ready_member
from tests.support.updated_instance import UpdatedInstance

OFFER = Offer("v1", UpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[2]], snapshot="/dev/shm/x"), "g", "f")
BASE = "a" * 32


class DueCanary:
    async def due(self, member: Member) -> bool:
        return True


def admit(
    offer: Offer | None,
    dialect: Dialect,
    *,
    canary: bool = False,
    mode: str = "first",
    hangs: bool = False,
    **settings: Any,
) -> list[str]:
    """The calls that were made."""
    member = ready_member("a")
    faults = ["hangs weight_info"] if hangs else []
    instance: Any = UpdatedInstance(*faults, dialect=dialect, base=BASE)
    member.client = instance
    admission = Admission(PublishSection.model_validate({"canary": mode, **settings}))
    admission.offer = offer
    stand_in: Any = DueCanary() if canary else None
    admission.canary = stand_in
    try:
        asyncio.run(admission.admit(member))
    except InstanceError:
        assert hangs or instance.calls == [], "nothing is asked of one that has to wait"
        raise
    return instance.calls  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("offer", "dialect", "canary", "words"),
    [
        (None, EMBEDDED, False, "there is no weight snapshot yet"),
        (
            OFFER,
            VLLM,
            False,
            r"its engine \(vllm\) is compared with the trainer then \(unless publish\.canary",
        ),
        (OFFER, EMBEDDED, True, r"it has to show then .* \(publish\.canary\)"),
    ],
)
def test_one_that_cannot_be_proven_now_joins_with_the_next_publish(
    offer: Offer | None, dialect: Dialect, canary: bool, words: str
) -> None:
    with pytest.raises(InstanceError, match=f"joins with the next publish: {words}"):
        admit(offer, dialect, canary=canary)


@pytest.mark.parametrize(("dialect", "mode"), [(EMBEDDED, "first"), (EMBEDDED, "off"), (VLLM, "off")])
def test_another_takes_every_step_of_an_update(dialect: Dialect, mode: str) -> None:
    steps = ["is_sleeping", "pause", "start_weight_update", "update_weights"]
    proofs = ["collective_rpc", "finish_weight_update", "collective_rpc", "resume", "weight_info"]
    assert admit(OFFER, dialect, mode=mode) == steps + proofs


@pytest.mark.parametrize("digest", [BASE, "f" * 32])
def test_one_with_another_base_than_that_below_the_adapters_joins_with_the_next_publish(digest: str) -> None:
    info = OFFER.info.model_copy(update={"adapter": AdapterInfo(rank=4, alpha=8, base=digest)})
    if digest == BASE:
        assert admit(replace(OFFER, info=info), EMBEDDED)[:4] == ["is_sleeping", "base_digest", "is_sleeping", "pause"]
    else:
        with pytest.raises(InstanceError, match="joins with the next publish: the weights of its model are others"):
            admit(replace(OFFER, info=info), EMBEDDED, hangs=True)


def test_all_of_it_ends_in_time_because_the_next_publish_waits() -> None:
    with pytest.raises(InstanceUnreachable, match=r"did not load the snapshot /dev/shm/x within 0\.05 s"):
        admit(OFFER, EMBEDDED, hangs=True, timeout_s=0.05)
