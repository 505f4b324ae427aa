"""One task group of a run over its restarts: placed, started, watched, placed again when it failed. Knows no Ray."""

from collections.abc import Callable
from typing import Literal

from async_rl.errors import ProcessFailed, RestartsExhausted
from deploy.cluster.restarts import DONE, Restarts, may_restart
from deploy.ray.groups import Cluster, GroupSpec, TaskEnd, TaskGroup

END_MARGIN_S = 10.0
"""Beyond the grace time of its tasks, until a group is removed whatever it still does."""

State = Literal["waiting", "placing", "starting", "running", "ending", "done", "failed"]
"""waiting: to be placed when its delay is over; done: it ended as it should; failed: it is not started again."""


class Slot:
    """A group under its name. As soon as one of its tasks has ended, the others are ended too.

    Args:
        trained: by the group, iterations with its contribution so far, see `restarts.num_trained`.
        note: shows the user a message.
    """

    def __init__(
        self,
        spec: GroupSpec,
        cluster: Cluster,
        restarts: Restarts,
        trained: Callable[[TaskGroup], int],
        note: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.restarts = restarts
        self.state: State = "waiting"
        self.since_s = 0.0
        """Since when it is in its state."""
        self.group: TaskGroup | None = None
        self.failure: ProcessFailed | RestartsExhausted | None = None
        """Why it failed."""
        self.cause: str | None = None
        """Why it was lost the last time."""
        self._cluster = cluster
        self._trained = trained
        self._note = note
        self._place_at_s = 0.0
        self._fault: TaskEnd | None = None
        self._may_end = False

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def is_healthy(self) -> bool:
        return self.state == "running" and self.group is not None and self.group.healthy

    def step(self, now_s: float, *, may_start: bool = True) -> None:
        """Looks at the group once; it is placed when that is due, and started once placed, if it may."""
        if self.is_over:
            return
        if self.group is None:
            if now_s < self._place_at_s:
                return
            self.group = self._cluster.place(self.spec)
            self._become("placing", now_s)
        self.group.poll()
        if self.state == "placing" and self.group.phase == "placed" and may_start:
            self.group.start()
            self._become("starting", now_s)
        if self.state == "starting" and self.group.phase == "running":
            self._become("running", now_s)
        self._watch_ends(self.group, now_s)

    def request_end(self, now_s: float) -> None:
        """Ends the group for good: it will be done."""
        self._may_end = True
        if self.is_over or self.state == "ending":
            return
        if self.group is None or self.state == "placing":
            self._finish("done", now_s)
        else:
            self.group.request_end()
            self._become("ending", now_s)

    def expect_end(self) -> None:
        """Its task was asked by the fleet to end: however it does, it is done."""
        self._may_end = True

    def _watch_ends(self, group: TaskGroup, now_s: float) -> None:
        ended = [end for end in group.ends if end is not None]
        # What ends because the others did is a consequence.
        self._fault = self._fault or next((end for end in ended if end.code != DONE), None)
        if ended and len(ended) == len(group.ends):
            self._decide(group, now_s)
        elif self.state == "ending":
            if now_s > self.since_s + self.spec.grace_s + END_MARGIN_S:
                self._decide(group, now_s)
        elif ended:
            if self._fault is not None:
                group.request_end()
            self._become("ending", now_s)

    def _decide(self, group: TaskGroup, now_s: float) -> None:
        """All tasks have ended: for good, or until they are placed again."""
        fault, self._fault = self._fault, None
        if self._may_end or fault is None:
            self._note(f"{self.spec.name} has ended")
            self._finish("done", now_s)
            return
        self.restarts.note_progress(self._trained(group))
        failure = ProcessFailed(fault.message, fault.kind)
        self.cause = fault.kind or fault.message.partition("\n")[0]
        may_pass = fault.code is None or may_restart(fault.code, fault.kind)
        delay_s = self.restarts.next_delay_s() if may_pass else None
        if delay_s is None:
            self.failure = self.restarts.exhausted(self.spec.name, failure) if may_pass else failure
            self._note(f"lost {fault.name}, it is not started again: {self.failure}")
            self._finish("failed", now_s)
            return
        self._note(
            f"lost {fault.name}, it is started again in {delay_s:g} s (restart {self.restarts.total}): {failure}"
        )
        self._place_at_s = now_s + delay_s
        self._finish("waiting", now_s)

    def _finish(self, state: State, now_s: float) -> None:
        if self.group is not None:
            self.group.remove()
            self.group = None
        self._become(state, now_s)

    def _become(self, state: State, now_s: float) -> None:
        self.state, self.since_s = state, now_s
