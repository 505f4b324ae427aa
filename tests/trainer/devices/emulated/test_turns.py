"""Runs whose pools share emulated devices in turns: never both in memory, the same bits, faults at every stage."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.devices.emulated.environment import peaks_of_all, recorded_waits
from tests.support.fresh_seed import fresh_seed
from tests.support.same_run import assert_same_run
from tests.trainer.devices.emulated.conftest import EmulatedRun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SETTINGS = ("--train.order=prompt", "--algorithm.kl_coef=0.05", "--checkpoint.every=1")
SIZE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
"""9 million parameters: what the check of the attention kernel takes at the start is less than a rank in training."""
MIB = 2**20


class Placed:
    """A run with a count of what all of its programs have on each device."""

    def __init__(self, emulated_run: Callable[..., EmulatedRun], folder: Path, name: str, **variables: object) -> None:
        self.usage = folder / "usage"
        family = str(variables.pop("family", "qwen3"))
        self.emulated = emulated_run(name, family, shared=self.usage, **variables)
        self.run = self.emulated.run

    def words(self, placement: str, *further: str) -> list[str]:
        if placement == "shared":
            return [*SETTINGS, "--publish.transport=ipc", "--run.placement=shared", *further]
        snapshots = ("--publish.transport=snapshot", f"--publish.snapshot_dir={self.emulated.folder}/snapshots")
        return [*SETTINGS, *snapshots, f"--run.placement={placement}", *further]

    def train(self, placement: str, *further: str) -> "Placed":
        self.emulated.train(*self.words(placement, *further))
        return self

    def start(self, placement: str, *further: str) -> None:
        self.run.start("--trainer.device=npu", *self.words(placement, *further))

    def peaks(self) -> list[int]:
        """Of each device that was used."""
        return [peak for peak in peaks_of_all(self.usage) if peak]


@pytest.fixture(scope="module")
def placed(emulated_run: Callable[..., EmulatedRun], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Placed]:
    return lambda name, **variables: Placed(emulated_run, tmp_path_factory.mktemp(f"{name}-usage"), name, **variables)


@pytest.fixture(scope="module")
def separate(placed: Callable[..., Placed]) -> Placed:
    return placed("separate").train("separate")


@pytest.mark.devices
def test_it_trains_the_same_bits_as_on_two_devices(placed: Callable[..., Placed], separate: Placed) -> None:
    in_turns = placed("turns").train("turns")
    assert_same_run(in_turns.run, separate.run)
    assert len(in_turns.peaks()) == 1 and len(separate.peaks()) == 2


@pytest.mark.devices
def test_pools_that_share_a_device_train_the_same_bits_with_weights_from_its_memory(
    placed: Callable[..., Placed], separate: Placed
) -> None:
    shared = placed("shared").train("shared")
    # The fingerprints of a device and of a file are others.
    losses, expected = ([row["loss"] for row in each.run.lines("metrics.jsonl")] for each in (shared, separate))
    assert losses == expected
    weights, expected_weights = (load_file(each.run.dir / "model/model.safetensors") for each in (shared, separate))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())
    waits = recorded_waits(shared.emulated.folder, "broadcast")
    assert waits["synchronize stream"] and not [kind for kind in waits if "copy" in kind and waits[kind]]
    assert len(shared.peaks()) == 1


@pytest.fixture(scope="module")
def large(placed: Callable[..., Placed], tiny_model: Callable[..., Path]) -> Callable[..., Placed]:
    """As `placed`, with a model of SIZE."""

    def make(name: str, **variables: object) -> Placed:
        made = placed(name, **variables)
        config = made.run.config
        small, large = (str(tiny_model("qwen3", tied=True, **size)) for size in ({}, SIZE))
        config.write_text(config.read_text().replace(small, large))
        return made

    return make


@pytest.fixture(scope="module")
def undisturbed(large: Callable[..., Placed]) -> Placed:
    return large("undisturbed").train("turns")


@pytest.mark.nightly
def test_an_instance_that_hangs_with_memory_of_a_full_device_is_ended_and_the_run_loses_nothing(
    large: Callable[..., Placed], undisturbed: Placed
) -> None:
    hung = large("hung", bytes=undisturbed.peaks()[0])
    hung.start("turns", "--publish.timeout_s=10")
    hung.run.wait_for_iterations(1)
    hung.run.hold()
    hung.run.wait_until(lambda: not hung.run.members()[0].num_requests)
    hung.run.hang_instance()
    hung.run.tell("")
    assert hung.run.finish() == 0, hung.run.everything_said()
    assert hung.run.restarts() == {"trainer": 0, "instance-0": 1}
    assert_same_run(hung.run, undisturbed.run)
    said = hung.run.everything_said()
    assert "holds memory that the trainer needs: it did not go to sleep" in said and "out of memory" not in said


@pytest.mark.nightly
def test_it_needs_the_memory_of_the_larger_pool_alone(large: Callable[..., Placed], undisturbed: Placed) -> None:
    apart = large("apart").train("separate")
    instance, rank = sorted(apart.peaks())
    # What stays for both: the canary's copy of a tied head.
    head = 4 * 96 * SIZE["hidden_size"]
    assert_same_run(undisturbed.run, apart.run)
    (capacity,) = undisturbed.peaks()
    print(f"a rank {rank / MIB:.1f} MiB, an instance {instance / MIB:.1f}, in turns {capacity / MIB:.1f}")
    assert capacity <= max(instance, rank) + head < instance + rank
    both = large("both", bytes=max(instance, rank) + head)
    both.start("shared", "--cluster.max_restarts=0")
    assert both.run.finish() != 0 and "NPU out of memory" in both.run.everything_said()


LAYOUTS = {
    "tp2": ("qwen3", "--trainer.tensor_parallel=2"),
    "cp2": ("qwen3", "--trainer.context_parallel=2"),
    "dp2": ("qwen3", "--model.dtype=bfloat16"),
    "pp2": ("qwen3", "--trainer.pipeline_parallel=2", "--algorithm.old_policy=lagged"),
    "ep2": ("qwen3_moe", "--trainer.expert_parallel=2"),
    "ppo": (
        *("qwen3", "--algorithm.name=ppo", "--algorithm.options.critic_learning_rate=1e-3"),
        *("--train.steps_per_batch=2", "--algorithm.old_policy=model", "--trainer.frozen_weights=host"),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_and_two_instances_take_turns_on_two_devices(placed: Callable[..., Placed], layout: str) -> None:
    family, *words = LAYOUTS[layout]
    words += ["--trainer.num_processes=2", "--inference.num_instances=2"]
    runs = [placed(f"{layout}-{p}", family=family).train(p, *words) for p in ("turns", "separate")]
    assert [len(run.peaks()) for run in runs] == [2, 4]
    assert_same_run(runs[0].run, runs[1].run)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["lost:7000", "oom:2000", "oom:4000"])
def test_a_fault_of_the_device_is_named_and_the_run_goes_on(
    placed: Callable[..., Placed], separate: Placed, fault: str
) -> None:
    kind = fault.partition(":")[0]
    faulty = placed(fault.replace(":", "-"), faults=f"{fault}@async_rl.trainer")
    faulty.start("turns")
    assert faulty.run.finish() == 0, faulty.run.everything_said()
    assert (faulty.emulated.folder / "records" / f"struck.{kind}").exists(), "the fault did not strike"
    assert {"oom": "NPU out of memory", "lost": "device lost"}[kind] in faulty.run.everything_said()
    assert_same_run(faulty.run, separate.run)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["instance", "trainer", "producer"])
def test_a_kill_at_any_stage_loses_nothing(placed: Callable[..., Placed], separate: Placed, victim: str) -> None:
    killed = placed(victim)
    killed.start("turns")
    killed.run.wait_for_iterations(1)
    # Within the next iteration, however fast the machine is.
    first = killed.run.lines("metrics.jsonl")[0]
    time.sleep(random.Random(fresh_seed()).uniform(0, first["seconds"] - first["canary_s"]))
    {
        "instance": lambda: killed.run.instances()[0].kill(),
        "trainer": killed.run.kill_trainer,
        "producer": lambda: killed.run.producer().kill(),
    }[victim]()
    assert killed.run.finish() == 0, killed.run.everything_said()
    # A producer that is lost before it has written samples does not write them later.
    iterations = [{row["iteration"] for row in killed.run.lines(name)} for name in ("metrics.jsonl", "samples.jsonl")]
    num_unsampled = len(iterations[0] - iterations[1])
    assert num_unsampled <= (victim == "producer")
    assert_same_run(killed.run, separate.run, num_unsampled)
