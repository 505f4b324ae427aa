"""Watches a run on a cluster and decides what is started, started again, and ended; `deploy.ray.run` calls `step`.

Nothing here knows Ray: groups are placed through `groups.Cluster`, and time is an argument.

The groups of the training nodes and of the first instances are placed at once, so that a cluster without room for them
is found at once. The training tasks start when these instances are healthy, since a trainer waits for its first
instance for `pool.timeout_s` only. From then on

- when a training task fails or is lost, the others are ended and all are placed again, while instances stay;
- an instance that fails or is lost is placed again under its name;
- instances are placed and drained as the scaler says, the last ones first.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from async_rl.errors import NotPlaced, ProcessFailed
from deploy.cluster.plan import ClusterPlan
from deploy.cluster.restarts import Restarts, num_trained
from deploy.ray.groups import Cluster, TaskGroup
from deploy.ray.scaling import Scaler
from deploy.ray.slot import Slot
from deploy.ray.specs import bundle, instance_group, instance_name, run_dir, training_group

SCALING_INTERVAL_S = 5.0

PLACEMENT_TIMEOUT_S = 180.0
"""For the training nodes and the first instances: an autoscaler starts a host in less."""

START_TIMEOUT_S = 1800.0
"""For a first instance that is neither healthy nor ended; vLLM may take many minutes to load and capture graphs."""


class Fleet(Protocol):
    """The fleet endpoint of the run, wherever its trainer runs at the time of a call."""

    def desired_instances(self) -> int | None:
        """How many instances would balance the pools; None if the trainer does not know yet, or does not answer."""
        ...

    def drain(self, name: str) -> bool:
        """Asks for the instance to finish what it has and to end; whether the fleet agreed."""
        ...


class Supervisor:
    """The tasks of one run; `note` shows the user a message."""

    def __init__(
        self, plan: ClusterPlan, cluster: Cluster, fleet: Fleet, scaler: Scaler, note: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._fleet = fleet
        self._scaler = scaler
        self._note = note
        self._run_dir = run_dir(plan)
        self.training = Slot(training_group(plan), cluster, self._restarts(), self._trained, note)
        self._instances: dict[str, Slot] = {}
        self._leaving: dict[str, Slot] = {}
        """Instances that the scaler no longer wants: drained, or about to be."""
        self._has_begun = False
        self._next_scaling_s = 0.0
        for _ in range(plan.min_instances):
            self._add_instance()

    @property
    def slots(self) -> Mapping[str, Slot]:
        """All groups by name, the training nodes first."""
        return {self.training.spec.name: self.training, **self._instances, **self._leaving}

    def step(self, now_s: float) -> bool:
        """Looks at every group once, and acts; whether the run is trained to its end. Called several times a second.

        Raises:
            NotPlaced: the cluster has no room for the training nodes or the first instances.
            ProcessFailed, RestartsExhausted: the trainer failed for good, or every instance did.
        """
        for slot in self._instances.values():
            slot.step(now_s)
        for name, slot in list(self._leaving.items()):
            slot.step(now_s)
            if slot.is_over:
                del self._leaving[name]
        self.training.step(now_s, may_start=self._may_train(now_s))
        for slot in self.slots.values():
            self._require_placed(slot, now_s)
        self._require_instances()
        if self.training.failure is not None:
            raise self.training.failure
        if self._has_begun and self._scaler.follows and now_s >= self._next_scaling_s:
            self._next_scaling_s = now_s + SCALING_INTERVAL_S
            self._scale(now_s)
        return self.training.state == "done"

    def end(self, now_s: float) -> bool:
        """Ends the training tasks, which save, and then the instances; whether all have ended. Called until then."""
        self.training.request_end(now_s)
        self.training.step(now_s)
        if not self.training.is_over:
            return False
        others = [*self._instances.values(), *self._leaving.values()]
        for slot in others:
            slot.request_end(now_s)
            slot.step(now_s)
        return all(slot.is_over for slot in others)

    def _may_train(self, now_s: float) -> bool:
        if not self._has_begun:
            slots = self._instances.values()
            self._has_begun = all(slot.is_healthy or slot.is_over for slot in slots)
            late = [name for name, slot in self._instances.items() if slot.state == "running" and not slot.is_healthy]
            for name in late:
                if now_s > self._instances[name].since_s + START_TIMEOUT_S:
                    raise ProcessFailed(f"{name} runs, but was not healthy within {START_TIMEOUT_S:g} s: see its log")
            if self._has_begun:
                self._note(f"{sum(slot.is_healthy for slot in slots)} instance(s) ready, starting the trainer")
        return self._has_begun

    def _require_placed(self, slot: Slot, now_s: float) -> None:
        """What the run cannot do without must find room in time; all else waits for it."""
        is_placed = slot.state not in ("placing", "starting") or slot.group is None or slot.group.phase == "placed"
        is_required = slot is self.training or not self._has_begun
        if not is_placed and is_required and now_s > slot.since_s + PLACEMENT_TIMEOUT_S:
            number = len(slot.spec.names)
            apart = ", each on a host of its own" if number > 1 else ""
            raise NotPlaced(
                f"the cluster has not placed {slot.spec.name} within {PLACEMENT_TIMEOUT_S:g} s: "
                f"{number} x {_shown(bundle(slot.spec.resources))}{apart}. Free: {self._cluster.free_resources()}. Add "
                "hosts, end what occupies them, or ask for less (cluster.training_nodes, "
                "trainer.num_processes, inference.num_instances, inference.tensor_parallel)"
            )

    def _require_instances(self) -> None:
        slots = [*self._instances.values(), *self._leaving.values()]
        failures = [slot.failure for slot in slots if slot.failure is not None]
        if failures and all(slot.is_over for slot in slots):
            raise failures[0]

    def _scale(self, now_s: float) -> None:
        target = self._scaler.update(self._fleet.desired_instances(), now_s)
        # One that failed for good counts: another one in its place would fail as well.
        for _ in range(target - len(self._instances)):
            self._note(f"{target} instances would balance the pools: starting {self._add_instance()}")
        last_first = sorted(self._instances, key=lambda name: (self._instances[name].is_over, _index(name)))[::-1]
        for name in last_first[: max(0, len(self._instances) - target)]:
            self._note(f"{target} instances would balance the pools: {name} leaves")
            self._leaving[name] = self._instances.pop(name)
        for name, slot in self._leaving.items():
            self._let_go(name, slot, now_s)

    def _let_go(self, name: str, slot: Slot, now_s: float) -> None:
        """An instance that serves finishes what it has, for as long as that takes; another one ends at once."""
        if slot.state in ("waiting", "placing", "starting"):
            slot.request_end(now_s)
        elif slot.state == "running" and self._fleet.drain(name):
            slot.expect_end()

    def _add_instance(self) -> str:
        """A slot under the first free name."""
        name = next(name for i in range(len(self.slots) + 1) if (name := instance_name(i)) not in self.slots)
        spec = instance_group(self._plan, name)
        self._instances[name] = Slot(spec, self._cluster, self._restarts(), self._sampled, self._note)
        return name

    def _restarts(self) -> Restarts:
        return Restarts(self._plan.config.cluster.max_restarts)

    def _trained(self, _group: TaskGroup) -> int:
        return num_trained(self._run_dir)

    def _sampled(self, group: TaskGroup) -> int:
        """Iterations in which the instance took part, by its port: it may be reached at another address than Ray's."""
        if not group.nodes:
            return 0
        port = group.nodes[0].ports[0]
        return num_trained(self._run_dir, lambda url: url.endswith(f":{port}"))


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
