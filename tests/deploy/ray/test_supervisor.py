"""The launcher's decisions, on a scripted cluster and a clock that the tests move."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from async_rl.errors import NotPlaced, ProcessFailed, RestartsExhausted
from deploy.cluster.plan import ClusterPlan, plan_cluster
from deploy.ray.groups import GroupSpec, Node, TaskEnd
from deploy.ray.scaling import Scaler
from deploy.ray.supervisor import START_TIMEOUT_S, Supervisor
from tests.support.minimal_config import config_of


class ScriptedGroup:
    """A group whose tasks do what a test says; one that is asked to end does so at once, unless it `hangs`."""

    def __init__(self, spec: GroupSpec, number: int) -> None:
        self.spec = spec
        self.phase = "placing"
        self.nodes: tuple[Node, ...] = ()
        self.healthy = False
        self.ends: list[TaskEnd | None] = [None] * len(spec.names)
        self.hangs = False
        self.never_runs = False
        self.is_removed = False
        self.asked_to_end = 0
        self._port = 9000 + number

    def poll(self) -> None:
        if self.phase == "starting" and not self.never_runs:
            self.phase = "running"
            self.nodes = tuple(Node(f"host-{i}", f"10.0.0.{i}", (self._port, 1)) for i in range(len(self.ends)))

    def start(self) -> None:
        assert self.phase == "placed"
        self.phase = "starting"

    def request_end(self) -> None:
        self.asked_to_end += 1
        if not self.hangs:
            self.ends = [
                end or TaskEnd(name, 143, None, "") for name, end in zip(self.spec.names, self.ends, strict=True)
            ]

    def remove(self) -> None:
        self.is_removed = True

    def ends_with(self, code: int | None, kind: str | None = None, *, task: int = 0) -> None:
        name = self.spec.names[task]
        self.ends[task] = TaskEnd(name, code, kind, f"{name} ended with {code}")


@dataclass
class ScriptedCluster:
    has_room: bool = True
    groups: list[ScriptedGroup] = field(default_factory=list)

    def place(self, spec: GroupSpec) -> ScriptedGroup:
        group = ScriptedGroup(spec, len(self.groups))
        group.phase = "placed" if self.has_room else "placing"
        group.healthy = True
        self.groups.append(group)
        return group

    def free_resources(self) -> str:
        return "CPU 1 on all hosts together"

    def of(self, name: str) -> ScriptedGroup:
        """The newest group of that name."""
        return [group for group in self.groups if group.spec.name == name][-1]

    def living(self) -> list[str]:
        return [group.spec.name for group in self.groups if not group.is_removed]


@dataclass
class ScriptedFleet:
    desired: int | None = None
    answers: bool = True
    drained: list[str] = field(default_factory=list)

    def desired_instances(self) -> int | None:
        return self.desired

    def drain(self, name: str) -> bool:
        self.drained.append(name)
        return self.answers


class Ground:
    """A supervisor of a run with two training nodes and two to four instances, and everything it talks to."""

    def __init__(self, run_dir: Path, **cluster: object) -> None:
        cluster = {"training_nodes": 2, "max_instances": 4, "max_restarts": 2, **cluster}
        config = config_of(run={"dir": str(run_dir)}, inference={"num_instances": 2}, cluster=cluster)
        self.plan: ClusterPlan = plan_cluster(Path("run.toml"), config, ())
        self.run_dir = run_dir
        self.cluster = ScriptedCluster()
        self.fleet = ScriptedFleet()
        self.notes: list[str] = []
        self.now_s = 0.0
        scaler = Scaler(self.plan.min_instances, self.plan.max_instances, up_after_s=10, down_after_s=20)
        self.supervisor = Supervisor(self.plan, self.cluster, self.fleet, scaler, self.notes.append)

    def step(self, times: int = 1, seconds: float = 0.2) -> bool:
        done = False
        for _ in range(times):
            self.now_s += seconds
            done = self.supervisor.step(self.now_s)
        return done

    def trained(self, iterations: int, port: int | None = None) -> None:
        gaps = {} if port is None else {f"http://10.0.0.9:{port}": {}}
        row = {"iteration": iterations - 1, "on_policy": True, "logprob_gaps": {"instances": gaps}}
        self.run_dir.mkdir(exist_ok=True)
        with (self.run_dir / "ledger.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def states(self) -> dict[str, str]:
        return {name: slot.state for name, slot in self.supervisor.slots.items()}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Ground]:
    return lambda **cluster: Ground(tmp_path / "run", **cluster)


@pytest.fixture
def ground(make: Callable[..., Ground]) -> Ground:
    return make()


def test_training_starts_when_the_first_instances_are_healthy(ground: Ground) -> None:
    ground.step()
    assert ground.states() == {"training": "placing", "instance-0": "starting", "instance-1": "starting"}
    ground.cluster.of("instance-1").healthy = False
    ground.step(5)
    assert ground.states()["training"] == "placing", "one of them still loads"
    ground.cluster.of("instance-1").healthy = True
    ground.step(3)
    assert set(ground.states().values()) == {"running"}
    assert ground.notes == ["2 instance(s) ready, starting the trainer"]


def test_a_run_whose_training_tasks_exit_with_0_is_done_and_then_all_instances_end(ground: Ground) -> None:
    ground.step(5)
    training = ground.cluster.of("training")
    training.ends_with(0, task=0)
    assert not ground.step()
    assert training.asked_to_end == 0, "the other one is about to end by itself"
    training.ends_with(0, task=1)
    assert ground.step()
    assert ground.supervisor.end(ground.now_s)
    assert ground.cluster.living() == []


def test_a_lost_training_node_ends_the_others_and_all_are_placed_again_while_instances_stay(ground: Ground) -> None:
    ground.step(5)
    first = ground.cluster.of("training")
    first.ends_with(None, task=1)
    ground.step()
    assert first.asked_to_end == 1
    ground.step()
    assert first.is_removed and ground.states()["training"] == "waiting"
    assert ground.notes[-1].startswith("lost trainer-1, it is started again in 1 s (restart 1)")
    ground.step(4, seconds=0.2)
    assert ground.cluster.of("training") is first, "not before its delay"
    ground.step(4, seconds=0.2)
    assert ground.cluster.of("training") is not first
    ground.step(2)
    assert ground.states() == {"training": "running", "instance-0": "running", "instance-1": "running"}
    assert len(ground.cluster.groups) == 4, "no instance was placed again"


def test_training_nodes_that_do_not_end_are_removed_after_their_grace_time(ground: Ground) -> None:
    ground.step(5)
    first = ground.cluster.of("training")
    first.hangs = True
    first.ends_with(1, task=0)
    ground.step()
    ground.step(seconds=ground.plan.training_grace_s)
    assert not first.is_removed
    ground.step(seconds=11)
    assert first.is_removed and ground.states()["training"] == "waiting"


@pytest.mark.parametrize("losses", [0, 2])
@pytest.mark.parametrize("kind", ["ConfigError", "OnPolicyViolation"])
def test_a_fault_that_no_restart_mends_ends_the_run_with_its_name(ground: Ground, kind: str, losses: int) -> None:
    """Also when it comes after the last restart."""
    for _ in range(losses):
        ground.step(4, seconds=3)
        ground.cluster.of("training").ends_with(137)
    ground.step(5, seconds=3)
    ground.cluster.of("training").ends_with(2 if kind == "ConfigError" else 4, kind)
    with pytest.raises(ProcessFailed, match="trainer-0 ended with") as failure:
        ground.step(2)
    assert failure.value.cause == kind


def test_the_named_end_comes_when_restarts_are_used_up_without_progress(ground: Ground) -> None:
    with pytest.raises(RestartsExhausted, match=r"started again 2 times without another iteration.*max_restarts = 2"):
        for _ in range(4):
            ground.step(4, seconds=3)
            ground.cluster.of("training").ends_with(137)
    assert [group.spec.name for group in ground.cluster.groups].count("training") == 3


def test_progress_gives_new_restarts(ground: Ground) -> None:
    for iteration in range(1, 6):
        ground.step(4, seconds=3)
        ground.trained(iteration)
        ground.cluster.of("training").ends_with(137)
    ground.step(4, seconds=3)
    assert ground.states()["training"] == "running"


def test_a_lost_instance_is_placed_again_under_its_name(ground: Ground) -> None:
    ground.step(5)
    first = ground.cluster.of("instance-1")
    first.ends_with(None)
    ground.step()
    assert first.is_removed and ground.states()["instance-1"] == "waiting"
    ground.step(4, seconds=1)
    assert ground.cluster.of("instance-1") is not first
    assert ground.states() == {"training": "running", "instance-0": "running", "instance-1": "running"}


def test_an_instance_that_fails_for_good_stays_away_and_the_last_one_ends_the_run(ground: Ground) -> None:
    ground.step(5)
    ground.cluster.of("instance-0").ends_with(2, "ConfigError")
    ground.step(5, seconds=5)
    assert ground.states()["instance-0"] == "failed"
    assert sorted(ground.cluster.living()) == ["instance-1", "training"], "nor does another one take its place"
    ground.cluster.of("instance-1").ends_with(2, "ConfigError")
    with pytest.raises(ProcessFailed, match="instance-0 ended with 2"):
        ground.step()


def test_an_instance_that_dies_again_and_again_is_given_up_although_others_train(ground: Ground) -> None:
    """Iterations in which it took no part are no progress of it."""
    ground.step(5)
    for iteration in range(1, 5):
        if ground.states()["instance-1"] != "failed":
            ground.cluster.of("instance-1").ends_with(139)
        ground.trained(iteration, port=1)
        ground.step(4, seconds=5)
    assert ground.states()["instance-1"] == "failed"
    assert "RestartsExhausted" in repr(ground.supervisor.slots["instance-1"].failure)


def test_what_the_run_cannot_do_without_must_find_room_in_time(ground: Ground) -> None:
    ground.cluster.has_room = False
    ground.step()
    ground.step(seconds=180)
    with pytest.raises(
        NotPlaced, match=r"has not placed training within 180 s: 2 x CPU 2, each on a host of its own"
    ) as e:
        ground.step(seconds=1)
    assert "Free: CPU 1 on all hosts together" in str(e.value)


def test_actors_that_never_run_count_as_not_placed(ground: Ground) -> None:
    ground.step()
    ground.cluster.of("training").never_runs = True
    ground.step(3)
    assert ground.states()["training"] == "starting"
    with pytest.raises(NotPlaced, match="has not placed training"):
        ground.step(2, seconds=100)


def test_an_instance_that_comes_later_waits_for_room(ground: Ground) -> None:
    ground.step(5)
    ground.cluster.has_room = False
    ground.cluster.of("instance-0").ends_with(None)
    ground.step(3, seconds=1000)
    assert ground.states()["instance-0"] == "placing"
    ground.cluster.of("instance-0").phase = "placed"
    ground.step(2)
    assert ground.states()["instance-0"] == "running"


def test_a_first_instance_that_never_gets_healthy_ends_the_run(ground: Ground) -> None:
    ground.step()
    ground.cluster.of("instance-0").healthy = False
    ground.step()
    with pytest.raises(ProcessFailed, match="instance-0 runs, but was not healthy within 1800 s"):
        ground.step(seconds=START_TIMEOUT_S + 1)


def test_the_number_of_instances_follows_what_is_desired(ground: Ground) -> None:
    ground.step(5)
    ground.fleet.desired = 9
    ground.step(4, seconds=5)
    ground.step(2)
    assert [name for name, state in ground.states().items() if state == "running"] == [
        "training",
        *(f"instance-{i}" for i in range(4)),
    ]
    ground.fleet.desired = 3
    ground.step(6, seconds=5)
    assert set(ground.fleet.drained) == {"instance-3"} and "instance-3" in ground.cluster.living(), "it finishes first"
    ground.cluster.of("instance-3").ends_with(0)
    ground.step()
    assert sorted(ground.cluster.living()) == ["instance-0", "instance-1", "instance-2", "training"]
    ground.step(10, seconds=5)
    assert len(ground.cluster.living()) == 4, "what was drained does not come back"


def test_an_instance_that_waits_for_room_is_not_drained_but_withdrawn(ground: Ground) -> None:
    ground.step(5)
    ground.cluster.has_room = False
    ground.fleet.desired = 3
    ground.step(4, seconds=5)
    assert ground.states()["instance-2"] == "placing"
    ground.fleet.desired = 2
    ground.step(6, seconds=5)
    assert ground.fleet.drained == [] and "instance-2" not in ground.states()
    assert ground.cluster.of("instance-2").is_removed


def test_a_drain_that_the_fleet_does_not_answer_is_asked_again(ground: Ground) -> None:
    ground.step(5)
    ground.fleet.desired = 3
    ground.step(4, seconds=5)
    ground.step(2)
    ground.fleet.desired, ground.fleet.answers = 2, False
    ground.step(8, seconds=5)
    assert len(ground.fleet.drained) > 1
    ground.cluster.of("instance-2").ends_with(None)
    ground.step(2, seconds=5)
    assert sorted(ground.cluster.living()) == ["instance-0", "instance-1", "training"], "it was to leave anyway"


def test_the_end_lets_the_trainer_save_before_the_instances_end(ground: Ground) -> None:
    ground.step(5)
    training = ground.cluster.of("training")
    training.hangs = True
    assert not ground.supervisor.end(ground.now_s)
    assert training.asked_to_end == 1 and ground.cluster.of("instance-0").asked_to_end == 0
    training.ends_with(143, task=0)
    training.ends_with(143, task=1)
    assert ground.supervisor.end(ground.now_s + 1)
    assert ground.cluster.of("instance-0").asked_to_end == 1
    assert ground.cluster.living() == []


def test_the_end_does_not_wait_for_ever(ground: Ground) -> None:
    ground.step(5)
    for group in ground.cluster.groups:
        group.hangs = True
    now_s = ground.now_s
    assert not ground.supervisor.end(now_s)
    now_s += ground.plan.training_grace_s + 11
    assert not ground.supervisor.end(now_s)
    now_s += ground.plan.instance_grace_s + 11
    assert ground.supervisor.end(now_s)
    assert ground.cluster.living() == []
