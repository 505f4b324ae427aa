"""The control calls of an update in their order, and what each failure says."""

import asyncio
from typing import Any, cast

import pytest

from async_rl.config.pool_section import PublishSection
from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable
from async_rl.rollouts.instance.http import MAX_ERROR_CHARS
from async_rl.rollouts.publish.instance_update import announcement, put_in_service, receive
from async_rl.shared.protocol.inference import UpdateInfo
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.sender import WeightSender, WeightSource
from tests.support.updated_instance import UpdatedInstance

INFO = UpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[2]])
FROM_SNAPSHOT = INFO.model_copy(update={"snapshot": "/dev/shm/run.v1.safetensors"})


def test_an_announcement_keeps_the_order_of_the_stream() -> None:
    specs = [TensorSpec("b", "bfloat16", (3, 4)), TensorSpec("a", "float32", ())]
    info = announcement(WeightSender(WeightSource(specs, lambda: ()), PublishSection(), "run").facts(), "whole")
    assert (info.names, info.dtype_names, info.shapes) == (["b", "a"], ["bfloat16", "float32"], [[3, 4], []])


def test_a_stream_is_received_in_three_steps() -> None:
    instance: Any = UpdatedInstance()
    asyncio.run(receive(instance, INFO, 5.0))
    assert instance.calls == ["is_sleeping", "pause", "start_weight_update", "update_weights"]


def test_one_that_another_program_put_to_sleep_is_woken_and_named(caplog: pytest.LogCaptureFixture) -> None:
    instance: Any = UpdatedInstance(sleeps=True)
    asyncio.run(receive(instance, INFO, 5.0))
    woken = ["is_sleeping", "wake_up?tags=weights", "wake_up?tags=kv_cache"]
    assert instance.calls == [*woken, "pause", "start_weight_update", "update_weights"]
    assert "instance http://a:1 sleeps or is paused" in caplog.text


@pytest.mark.parametrize("step", ["pause", "update_weights"])
def test_a_refused_step_ends_it(step: str) -> None:
    instance: Any = UpdatedInstance(step)
    with pytest.raises(InstanceRefused, match=f"{step} is refused"):
        asyncio.run(receive(instance, INFO, 5.0))
    assert instance.calls[-1] == step


def test_a_refused_start_counts_only_if_the_update_fails_too_and_both_are_said() -> None:
    instance: Any = UpdatedInstance("start_weight_update")
    asyncio.run(receive(instance, INFO, 5.0))
    assert instance.calls[-1] == "update_weights"
    both: Any = UpdatedInstance("start_weight_update", "update_weights")
    with pytest.raises(InstanceError, match=r"update_weights is refused; before that: .*start_weight_update is"):
        asyncio.run(receive(both, INFO, 5.0))


def test_a_snapshot_has_a_time_and_a_broadcast_is_bounded_by_its_sender() -> None:
    instance: Any = UpdatedInstance("hangs update_weights")
    with pytest.raises(InstanceUnreachable, match=r"did not read the snapshot /dev/shm/.* within 0\.05 s \(publish"):
        asyncio.run(receive(instance, FROM_SNAPSHOT, 0.05))

    async def broadcast() -> None:
        await asyncio.wait_for(receive(instance, INFO, 0.05), 0.4)

    with pytest.raises(TimeoutError):
        asyncio.run(broadcast())


def test_equal_fingerprints_of_all_workers_put_it_in_service() -> None:
    instance: Any = UpdatedInstance(fingerprints=("f", "f"))
    asyncio.run(put_in_service(instance, "f", "v1", 5.0))
    assert instance.calls == [
        "collective_rpc",
        "finish_weight_update",
        "collective_rpc",
        "resume",
        "weight_info",
    ]


def test_what_changes_as_it_is_put_in_service_does_not_resume() -> None:
    instance: Any = UpdatedInstance(fingerprints=("f",))
    instance.changes_to = ("g",)
    with pytest.raises(InstanceError, match="computes with weights with fingerprints"):
        asyncio.run(put_in_service(instance, "f", "v1", 5.0))
    assert "resume" not in instance.calls


@pytest.mark.parametrize("fingerprints", [(), ("g",), ("f", "g"), ("", "f"), ("None",)])
def test_any_other_fingerprint_keeps_it_out_before_it_has_the_version(fingerprints: tuple[str, ...]) -> None:
    instance: Any = UpdatedInstance(fingerprints=fingerprints)
    with pytest.raises(InstanceError, match=r"received weights with fingerprints \[.*\], sent was 'f'"):
        asyncio.run(put_in_service(instance, "f", "v1", 5.0))
    assert instance.calls == ["collective_rpc"]


def test_what_it_claims_is_cut() -> None:
    for instance in (UpdatedInstance(fingerprints=("x" * 10**6,)), UpdatedInstance(version="v" * 10**6)):
        with pytest.raises(InstanceError, match=r"xxx|vvv") as caught:
            asyncio.run(put_in_service(cast(Any, instance), "f", "v1", 5.0))
        assert len(str(caught.value)) < MAX_ERROR_CHARS + 200


@pytest.mark.parametrize("version", ["v0", "", "v1, v0"])
def test_one_that_reports_another_version_afterwards_stays_out(version: str) -> None:
    instance: Any = UpdatedInstance(version=version)
    with pytest.raises(InstanceError, match=f"reports weight version '{version}' after publishing 'v1'"):
        asyncio.run(put_in_service(instance, "f", "v1", 5.0))
