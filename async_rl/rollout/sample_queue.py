"""The bounded queue between the producer's coroutines and the training loop: exactly one batch of groups.

The producer puts groups as they finish, from the event loop's thread; the training loop takes available groups in the
main thread, and may wait there. It is woken by the next group, by the producer's failure or end, or by `close`; and it
checks, every `POLL_S`, that the thread that should wake it is still alive.
"""

import threading
from collections.abc import Callable, Collection

from async_rl.errors import OnPolicyViolation, RolloutLost
from async_rl.types import Group, WeightVersion

POLL_S = 0.5


class SampleQueue:
    """Carries exactly `num_groups` groups, all of `version`, from producer to consumer.

    A producer never waits: the queue has room for the whole batch and refuses anything beyond it.
    """

    def __init__(self, num_groups: int, version: WeightVersion, watch: Callable[[], None] = lambda: None) -> None:
        """`watch` is called by a waiting consumer, and raises when waiting has become useless."""
        self._num_groups = num_groups
        self._version = version
        self._watch = watch
        self._groups: list[Group] = []
        self._seen: set[int] = set()
        self._cancelled: set[int] = set()
        self._num_taken = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def put(self, group: Group) -> None:
        """Adds a group and wakes the consumer; after `close` the group is dropped, and so is a cancelled one.

        Raises:
            OnPolicyViolation: the group is of another weight version, its index is a duplicate, or the batch is full.
        """
        with self._changed:
            if self._closed or group.index in self._cancelled:
                return
            self._require_expected(group)
            self._seen.add(group.index)
            self._groups.append(group)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends the batch: the consumer raises `error` at once, before any group still queued; the first error wins."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def cancel(self, indices: Collection[int]) -> None:
        """These groups, which the consumer has not got, are not part of the batch any more."""
        with self._changed:
            self._cancelled |= set(indices)
            self._num_groups -= len(indices)
            self._seen -= self._cancelled
            self._groups = [group for group in self._groups if group.index not in self._cancelled]
            self._changed.notify_all()

    def is_cancelled(self, index: int) -> bool:
        with self._changed:
            return index in self._cancelled

    def end(self) -> None:
        """No more groups will be added: a consumer of an incomplete batch gets a `RolloutLost`."""
        with self._changed:
            num_missing = self._num_groups - len(self._seen)
        if num_missing:
            self.fail(
                RolloutLost(
                    f"{num_missing} of {self._num_groups} rollouts ended without a group and without an error: "
                    "something beside them cancelled them; go on from the checkpoint with run.resume = true"
                )
            )

    def close(self) -> None:
        """Ends the batch from the consumer's side; a consumer still waiting gets a RuntimeError."""
        with self._changed:
            self._closed = True
            self._groups.clear()
            self._changed.notify_all()

    def ready(self, wait: bool) -> list[Group]:
        """The groups that finished since the last call, in order of completion.

        With `wait` at least one, and none only after exactly `num_groups` of them; without, those available now.

        Raises:
            BaseException: the producer's failure, with its own traceback.
            RuntimeError: the queue was closed before the batch was complete.
            AsyncRLError: raised by `watch`.
        """
        with self._changed:
            while wait and not self._groups and self._num_taken < self._num_groups and not self._ended:
                self._watch()
                self._changed.wait(POLL_S)
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise RuntimeError(f"the queue was closed after {self._num_taken} of {self._num_groups} groups")
            groups, self._groups = self._groups, []
            self._num_taken += len(groups)
            return groups

    @property
    def _ended(self) -> bool:
        return self._failure is not None or self._closed

    def _require_expected(self, group: Group) -> None:
        versions = frozenset({group.weight_version}).union(*(r.weight_versions for r in group.responses))
        if versions != {self._version}:
            raise OnPolicyViolation(
                f"group {group.index} (prompt {group.prompt.prompt_id}) has weight versions {sorted(versions)}, "
                f"but this batch trains {self._version!r}: drain the instance before publishing"
            )
        if group.index in self._seen:
            raise OnPolicyViolation(
                f"group {group.index} (prompt {group.prompt.prompt_id}) came twice: an index of the batch trains once"
            )
        if len(self._seen) == self._num_groups:
            raise OnPolicyViolation(
                f"group {group.index} (prompt {group.prompt.prompt_id}) came after all {self._num_groups} groups"
            )
