"""How a machine is shared: generated over numbers of devices and cores, and layouts of both pools."""

from itertools import product
from typing import Any

import pytest

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.local.machine import Machine
from deploy.local.machine_shares import MAX_THREADS, Share, share_out

TREE: dict[str, Any] = {
    "run": {"dir": "runs/one"},
    "model": {"path": "a-model"},
    "prompts": {"source": "rows.jsonl", "prompts_per_batch": 64},
    "reward": {"name": "math"},
    "train": {"iterations": 3},
}


def make_config(
    device: str, ranks: int, instances: int, workers: int, engine: str = "vllm", placement: str = "separate"
) -> Config:
    tree = {
        **TREE,
        "run": {"dir": "runs/one", "placement": placement},
        "publish": {"transport": "snapshot", "snapshot_dir": "/dev/shm/w"} if placement != "separate" else {},
        "trainer": {"device": device, "num_processes": ranks},
        "inference": {"engine": engine, "num_instances": instances, "tensor_parallel": workers},
    }
    return parse_config(tree, source="test")


DEVICES = (1, 2, 8, 16)
CORES = (0, 1, 2, 7, 64, 192)
LAYOUTS = list(product((1, 2, 3, 4, 8), (1, 2, 3, 5), (1, 2, 4)))
"""Training ranks, instances, workers of an instance."""


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize("num_cores", CORES)
def test_every_layout_gets_devices_of_its_own_and_a_fair_part_of_the_cores_or_is_refused(
    num_devices: int, num_cores: int
) -> None:
    # An outer restriction to other devices than the first, under names of its own.
    machine = Machine(tuple(range(100, 100 + num_cores)), tuple(str(3 * i + 1) for i in range(num_devices)))
    for ranks, instances, workers in LAYOUTS:
        config = make_config("cuda", ranks, instances, workers)
        needed = ranks + instances * workers
        if needed > num_devices:
            with pytest.raises(ConfigError) as refused:
                share_out(config, machine)
            for part in (
                f"needs {needed} devices: trainer.num_processes = {ranks} + inference.num_instances = {instances} x "
                f"inference.tensor_parallel = {workers}; there are {num_devices} ",
                "CUDA_VISIBLE_DEVICES",
            ):
                assert part in str(refused.value)
            continue
        of_instances, of_trainer = share_out(config, machine)
        shares = [*of_instances, of_trainer]
        assert [len(share.devices) for share in shares] == [*[workers] * instances, ranks]
        given = [name for share in shares for name in share.devices]
        assert len(set(given)) == len(given) and set(given) <= set(machine.devices)
        assert_fair([*[workers] * instances, ranks], shares, machine)
        for share in shares:
            first = machine.devices.index(share.devices[0])
            assert share.devices == machine.devices[first : first + len(share.devices)], "neighbours"


def assert_fair(workers: list[int], shares: list[Share], machine: Machine) -> None:
    assert all(1 <= share.threads <= MAX_THREADS for share in shares)
    if len(machine.cores) < sum(workers) + len(workers):
        assert all(share.cores == () and share.threads == 1 for share in shares), "too few to keep apart"
        return
    given = [core for share in shares for core in share.cores]
    assert sorted(given) == list(machine.cores), "each to one process, none left over"
    per_worker = len(machine.cores) / (sum(workers) + len(workers))
    for num, share in zip(workers, shares, strict=True):
        assert len(share.cores) >= 2, "a process on a device has several cores"
        assert len(share.cores) == pytest.approx((num + 1) * per_worker, abs=len(workers))
        assert share.threads * num < len(share.cores), "one core is left to what is not computing"


def test_wide_instances_begin_at_a_multiple_of_their_width() -> None:
    machine = Machine((), tuple(map(str, range(16))))
    of_instances, of_trainer = share_out(make_config("npu", 2, 3, 4), machine)
    assert [share.devices[0] for share in of_instances] == ["0", "4", "8"]
    assert of_trainer.devices == ("12", "13")


def test_pools_with_one_device_are_told_how_to_share_it() -> None:
    with pytest.raises(ConfigError, match=r"needs 2 devices.*there are 1 \(0\): set run\.placement to 'shared'"):
        share_out(make_config("cuda", 1, 1, 1), Machine((), ("0",)))


@pytest.mark.parametrize("num_devices", DEVICES)
def test_pools_that_share_get_the_same_devices_each_with_its_own_apart(num_devices: int) -> None:
    machine = Machine((), tuple(map(str, range(num_devices))))
    for ranks, instances, workers in LAYOUTS:
        config = make_config("cuda", ranks, instances, workers, placement="shared")
        if max(ranks, instances * workers) > num_devices:
            with pytest.raises(ConfigError, match=rf"= {ranks} for each pool, inference\.num_instances"):
                share_out(config, machine)
            continue
        of_instances, of_trainer = share_out(config, machine)
        assert of_trainer.devices == machine.devices[:ranks]
        assert sum((share.devices for share in of_instances), ()) == machine.devices[: instances * workers]


def test_sharing_needs_weights_in_a_snapshot_or_in_mapped_memory() -> None:
    tree = {**TREE, "run": {"dir": "runs/one", "placement": "shared"}}
    with pytest.raises(ConfigError, match=r"run\.placement is 'shared', but publish\.transport is 'broadcast'"):
        parse_config(tree, source="test")
    tree["publish"] = {"transport": "ipc"}
    assert parse_config(tree, source="test").publish.snapshot_dir is None


def test_no_device_at_all_asks_for_the_driver() -> None:
    with pytest.raises(ConfigError, match=r"there are none: check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"):
        share_out(make_config("npu", 1, 1, 1), Machine())


@pytest.mark.parametrize(
    ("cores", "num_instances", "of_instances", "of_trainer"),
    [
        ((), 1, [()], ()),
        ((3,), 2, [(), ()], ()),
        ((4, 5), 1, [(4,)], (5,)),
        ((0, 1), 3, [(0,), (0,), (0,)], (1,)),
        ((0, 1, 2, 3), 2, [(0,), (1,)], (2, 3)),
    ],
)
def test_the_embedded_engine_has_one_core_and_one_thread_on_a_cpu(
    cores: tuple[int, ...], num_instances: int, of_instances: list[tuple[int, ...]], of_trainer: tuple[int, ...]
) -> None:
    instances, trainer = share_out(make_config("cpu", 1, num_instances, 1, "transformers"), Machine(cores))
    assert [share.cores for share in instances] == of_instances and trainer.cores == of_trainer
    assert {share.threads for share in (*instances, trainer)} == {1} and trainer.devices == ()


@pytest.mark.parametrize(("num_cores", "expected"), [(2, [1, 1]), (16, [7, 7]), (64, [16, 16])])
def test_vllm_on_a_cpu_shares_the_cores_with_the_trainer(num_cores: int, expected: list[int]) -> None:
    (instance,), trainer = share_out(make_config("cpu", 1, 1, 1), Machine(tuple(range(num_cores))))
    assert [instance.threads, trainer.threads] == expected
    assert len(instance.cores) == len(trainer.cores) == num_cores // 2
