"""What the supervisor sees of a task group, which Ray places as a whole; `deploy.ray.placement` implements it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deploy.cluster.plan import Resources
from deploy.cluster.process import Process


@dataclass(frozen=True, slots=True)
class Node:
    """Where a task was placed: the host's name, its address in the cluster, and free ports of that address."""

    host: str
    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Tasks that are placed together, each on a host of its own: `names[i]` runs `processes(nodes)[i]`.

    When they are to end, they are given `grace_s`.
    """

    name: str
    names: tuple[str, ...]
    resources: Resources
    grace_s: float
    processes: Callable[[Sequence[Node]], Sequence[Process]]


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How a task ended: its exit code, None if its actor or host was lost; the named error it reported, if any."""

    name: str
    code: int | None
    kind: str | None
    message: str


class TaskGroup(Protocol):
    """A group that was asked for; calls return at once."""

    phase: Literal["placing", "placed", "starting", "running"]
    nodes: Sequence[Node]
    """Where its tasks run; empty before that."""

    healthy: bool
    """Whether its tasks run, and an instance answers as healthy."""

    ends: list[TaskEnd | None]
    """None for a task that has not ended."""

    def poll(self) -> None:
        """Brings the attributes up to date."""
        ...

    def start(self) -> None:
        """Starts the tasks of a group that is placed."""
        ...

    def request_end(self) -> None:
        """SIGTERM to all tasks, and SIGKILL after their grace time."""
        ...

    def remove(self) -> None:
        """Ends what is left of the group, and gives its resources back."""
        ...


class Cluster(Protocol):
    """Places groups."""

    def place(self, spec: GroupSpec) -> TaskGroup: ...

    def free_resources(self) -> str:
        """What is free now, for the error of a group that found no room."""
        ...
