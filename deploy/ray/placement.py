"""Task groups on a Ray cluster: a placement group each, with an actor for each task. The only file that places things.

Every call returns at once; what Ray has done since is seen by the next `poll`. Actors are never restarted by Ray: it
would start one again while the process of the other still ends, and `deploy.ray.slot` decides about restarts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.shared.programs.command_line import USAGE_ERROR
from deploy.cluster.restarts import DONE
from deploy.ray.groups import GroupSpec, Node, TaskEnd
from deploy.ray.specs import RESOURCE_OF, TRAINING, bundle
from deploy.ray.task_actor import TaskActor

NUM_CALLS = 4
"""Calls that an actor answers at once: `healthy`, `wait`, and others meanwhile."""


GUARD_LIVES = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""An actor that exits by itself, as without its launcher, would kill its guard, without the grace time of the task."""


class RayCluster:
    """Places groups on the cluster that this process is connected to.

    Args:
        run_dir: the run's directory as all hosts see it, which has the `launch_id` of this launch.
    """

    def __init__(self, run_dir: str, directory: str, launch_id: str, token: str | None) -> None:
        self._run_dir = run_dir
        self._directory = directory
        self._launch_id = launch_id
        self._token = token

    def place(self, spec: GroupSpec) -> "RayGroup":
        actor = (self._token, self._directory)
        return RayGroup(spec, actor, (self._run_dir, self._launch_id))

    def free_resources(self) -> str:
        """What each host has in all, and what is free on all of them together."""
        hosts = [
            f"{node['NodeManagerHostname']} has {_shown(node['Resources'])}" for node in ray.nodes() if node["Alive"]
        ]
        return f"{_shown(ray.available_resources()) or 'nothing'} on all hosts together ({'; '.join(hosts)})"


class RayGroup:
    """See `deploy.ray.groups.TaskGroup`.

    Args:
        actor: arguments of the `TaskActor`s.
        meet: arguments of their `meet`.
    """

    def __init__(self, spec: GroupSpec, actor: tuple[str | None, str], meet: tuple[str, str]) -> None:
        self.phase: Literal["placing", "placed", "starting", "running"] = "placing"
        self.nodes: Sequence[Node] = ()
        self.healthy = False
        self.ends: list[TaskEnd | None] = [None] * len(spec.names)
        self._spec = spec
        self._actor = actor
        self._meet = meet
        bundles = [bundle(spec.resources)] * len(spec.names)
        self._placement: PlacementGroup = placement_group(
            bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK", name=spec.name
        )
        self._actors: list[Any] = []
        self._meetings: list[Any] = []
        self._runs: list[Any] = []
        self._health: list[Any] = []

    def poll(self) -> None:
        if self.phase == "placing":
            if placement_group_table(self._placement).get("state") == "CREATED":
                self.phase = "placed"
        elif self.phase == "starting":
            self._poll_meetings()
        elif self.phase == "running":
            self._poll_runs()

    def start(self) -> None:
        self._actors = [self._make_actor(i) for i in range(len(self.ends))]
        self._meetings = [actor.meet.remote(*self._meet) for actor in self._actors]
        self.phase = "starting"

    def request_end(self) -> None:
        if self.phase != "running":
            self._end_rest()
        for actor in self._actors:
            actor.end.remote()

    def remove(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(self._placement)

    def _make_actor(self, index: int) -> Any:
        asked = bundle(self._spec.resources)
        actor = ray.remote(TaskActor).options(
            num_cpus=asked["CPU"],
            num_gpus=asked.get("GPU", 0),
            resources={"NPU": asked["NPU"]} if "NPU" in asked else None,
            max_concurrency=NUM_CALLS,
            max_restarts=0,
            runtime_env=GUARD_LIVES,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=index),
        )
        return actor.remote(*self._actor)

    def _poll_meetings(self) -> None:
        """No process is started before all hosts are known: the first one's address is part of every command."""
        met = _answers(self._meetings)
        faults = {i: answer for i, answer in met.items() if isinstance(answer, BaseException)}
        if faults:
            for i, fault in faults.items():
                self.ends[i] = _fault(self._spec.names[i], fault)
            self._end_rest()
        elif len(met) == len(self._meetings):
            self.nodes = [met[i] for i in range(len(met))]
            processes = self._spec.processes(self.nodes)
            self._runs = [actor.run.remote(process) for actor, process in zip(self._actors, processes, strict=True)]
            if self._spec.name != TRAINING:
                self._health = [actor.healthy.remote() for actor in self._actors]
            self.phase = "running"

    def _poll_runs(self) -> None:
        for i, answer in _answers(self._runs).items():
            if self.ends[i] is None:
                self.ends[i] = _fault(self._spec.names[i], answer) if isinstance(answer, BaseException) else answer
        self.healthy = self.healthy or all(_answers([ref]).get(0) is True for ref in self._health)

    def _end_rest(self) -> None:
        """Tasks that have not started a process have nothing to end."""
        names = self._spec.names
        self.ends = [end or TaskEnd(name, DONE, None, "") for name, end in zip(names, self.ends, strict=True)]


def _answers(refs: Sequence[Any]) -> dict[int, Any]:
    """What the calls returned or raised, by their index; those that go on are left out."""
    if not refs:
        return {}
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=True)
    return {i: _answer(ref) for i, ref in enumerate(refs) if ref in done}


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def _fault(name: str, error: BaseException) -> TaskEnd:
    """An error of our own that the actor raised, or the loss of the actor, as Ray tells it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, AsyncRLError):
        code = USAGE_ERROR if isinstance(cause, ConfigError) else 1
        return TaskEnd(name, code, type(cause).__name__, str(cause))
    return TaskEnd(name, None, None, f"its actor was lost: {str(error).strip() or type(error).__name__}")


def _shown(resources: Mapping[str, float]) -> str:
    """Cores and devices; without Ray's own entries for hosts and memory."""
    shown = {name: resources.get(name, 0.0) for name in ("CPU", *RESOURCE_OF.values())}
    return ", ".join(f"{name} {amount:g}" for name, amount in shown.items() if amount or name == "CPU")
