"""The control calls of an update in their order, and what each failure says."""

import asyncio
from typing import Any

import pytest

from async_rl.config.pool_section import PublishSection
from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable
from async_rl.rollouts.publish.instance_update import announcement, put_in_service, receive
from async_rl.shared.protocol.inference import UpdateInfo
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.sender import WeightSender, WeightSource

INFO = UpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[2]])
FROM_SNAPSHOT = INFO.model_copy(update={"snapshot": "/dev/shm/run.v1.safetensors"})


class Instance:
    """Notes the calls, and refuses some."""

    url = "http://a:1"

    def __init__(
        self, *refused: str, fingerprints: tuple[str, ...] = ("f",), version: str = "v1", sleeps: bool = False
    ) -> None:
        self.calls: list[str] = []
        self._refused = refused
        self._fingerprints = list(fingerprints)
        self._version = version
        self._sleeps = sleeps

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self._refused:
                raise InstanceRefused(f"{name} is refused", 500)
            if name == "update_weights" and "hangs" in self._refused:
                await asyncio.Event().wait()
            if name == "wake_up":
                self.calls[-1] = f"wake_up {arguments[0]}"
            own = {"weight_fingerprints": self._fingerprints, "weight_version": self._version}
            return (own | {"is_sleeping": self._sleeps}).get(name)

        return call


def test_an_announcement_keeps_the_order_of_the_stream() -> None:
    specs = [TensorSpec("b", "bfloat16", (3, 4)), TensorSpec("a", "float32", ())]
    info = announcement(WeightSender(WeightSource(specs, lambda: ()), PublishSection(), "run").facts(), "whole")
    assert (info.names, info.dtype_names, info.shapes) == (["b", "a"], ["bfloat16", "float32"], [[3, 4], []])


def test_a_stream_is_received_in_three_steps() -> None:
    instance: Any = Instance()
    asyncio.run(receive(instance, INFO, 5.0))
    assert instance.calls == ["is_sleeping", "pause", "start_weight_update", "update_weights"]


def test_one_that_another_program_put_to_sleep_is_woken_and_named(caplog: pytest.LogCaptureFixture) -> None:
    instance: Any = Instance(sleeps=True)
    asyncio.run(receive(instance, INFO, 5.0))
    woken = ["is_sleeping", "wake_up weights", "wake_up kv_cache"]
    assert instance.calls == [*woken, "pause", "start_weight_update", "update_weights"]
    assert "instance http://a:1 sleeps or is paused" in caplog.text


@pytest.mark.parametrize("step", ["pause", "update_weights"])
def test_a_refused_step_ends_it(step: str) -> None:
    instance: Any = Instance(step)
    with pytest.raises(InstanceRefused, match=f"{step} is refused"):
        asyncio.run(receive(instance, INFO, 5.0))
    assert instance.calls[-1] == step


def test_a_refused_start_counts_only_if_the_update_fails_too_and_both_are_said() -> None:
    instance: Any = Instance("start_weight_update")
    asyncio.run(receive(instance, INFO, 5.0))
    assert instance.calls[-1] == "update_weights"
    both: Any = Instance("start_weight_update", "update_weights")
    with pytest.raises(InstanceError, match="update_weights is refused; before that: start_weight_update is refused"):
        asyncio.run(receive(both, INFO, 5.0))


def test_a_snapshot_has_a_time_and_a_broadcast_is_bounded_by_its_sender() -> None:
    instance: Any = Instance("hangs")
    with pytest.raises(InstanceUnreachable, match=r"did not read the snapshot /dev/shm/.* within 0\.05 s \(publish"):
        asyncio.run(receive(instance, FROM_SNAPSHOT, 0.05))

    async def broadcast() -> None:
        await asyncio.wait_for(receive(instance, INFO, 0.05), 0.4)

    with pytest.raises(TimeoutError):
        asyncio.run(broadcast())


def test_equal_fingerprints_of_all_workers_put_it_in_service() -> None:
    instance: Any = Instance(fingerprints=("f", "f"))
    asyncio.run(put_in_service(instance, "f", "v1", 5.0))
    expected = ["weight_fingerprints", "finish_weight_update", "weight_fingerprints", "resume", "weight_version"]
    assert instance.calls == expected


def test_what_changes_as_it_is_put_in_service_does_not_resume() -> None:
    instance: Any = Instance(fingerprints=("f",))
    finish = instance.finish_weight_update

    async def finish_otherwise(*given: Any) -> None:
        await finish(*given)
        instance._fingerprints = ("g",)

    instance.finish_weight_update = finish_otherwise
    with pytest.raises(InstanceError, match="computes with weights with fingerprints"):
        asyncio.run(put_in_service(instance, "f", "v1", 5.0))
    assert "resume" not in instance.calls


@pytest.mark.parametrize("fingerprints", [(), ("g",), ("f", "g"), ("", "f"), ("None",)])
def test_any_other_fingerprint_keeps_it_out_before_it_has_the_version(fingerprints: tuple[str, ...]) -> None:
    instance: Any = Instance(fingerprints=fingerprints)
    with pytest.raises(InstanceError, match=r"received weights with fingerprints \[.*\], sent was 'f'"):
        asyncio.run(put_in_service(instance, "f", "v1", 5.0))
    assert instance.calls == ["weight_fingerprints"]


@pytest.mark.parametrize("version", ["v0", "", "v1, v0"])
def test_one_that_reports_another_version_afterwards_stays_out(version: str) -> None:
    instance: Any = Instance(version=version)
    with pytest.raises(InstanceError, match=f"reports weight version '{version}' after publishing 'v1'"):
        asyncio.run(put_in_service(instance, "f", "v1", 5.0))
