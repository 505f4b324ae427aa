"""Additions, drains and removals by hand, kept for the run's next producers, of this trainer and of those after it."""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from async_rl.errors import WriteFailed
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.shared.files import write_file

log = logging.getLogger(__name__)

ORDERS_FILE = "fleet_orders.json"


class Left(msgspec.Struct):
    """An instance that was drained or removed; `boot_id` is that of its heartbeats."""

    url: str
    boot_id: str | None


class Kept(msgspec.Struct):
    """`run` is the uid of the run that they were given to, `instances` its `pool.instances`; `added` has names by URL,
    `left` has names, too."""

    run: str
    instances: Sequence[str]
    added: dict[str, str] = {}
    left: dict[str, Left] = {}


class Orders:
    """Carries orders out, and keeps them in a file of the run's directory.

    Args:
        path: the file; None keeps nothing.
        run: the run's uid.
        instances: its `pool.instances`. Who starts the run with others has decided anew.
    """

    def __init__(
        self, pool: InferencePool, path: Path | None = None, run: str = "", instances: Sequence[str] = ()
    ) -> None:
        self._pool = pool
        self._path = path
        self._kept = Kept(run, list(instances))

    def repeat(self) -> None:
        """Carries out those that the run was given before, if it has been started with the same `pool.instances`."""
        if self._path is None or not self._path.exists():
            return
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=Kept)
        except msgspec.DecodeError as error:
            log.warning("orders to the fleet are not repeated: %s is not readable: %s", self._path, error)
            return
        if (kept.run, kept.instances) != (self._kept.run, self._kept.instances):
            return
        self._kept = kept
        for name, left in kept.left.items():
            self._pool.bar(name, left.url, left.boot_id)
            log.info("%s was drained or removed by hand, and stays out until it is added (async-rl fleet add)", name)
        for url, name in kept.added.items():
            if all(member.url != url for member in self._pool.members):
                self._pool.add(url, name)
                log.info("%s was added by hand, at %s", name, url)

    def has_left(self, url: str) -> bool:
        """Whether the instance there was drained or removed."""
        return any(left.url == url for left in self._kept.left.values())

    def forget(self, url: str, name: str | None = None) -> None:
        """What is there, or is called so, from now on is another instance."""
        left = {n: each for n, each in self._kept.left.items() if n != name and each.url != url}
        if len(left) < len(self._kept.left):
            self._kept.left = left
            self._write()

    def register(self, url: str, name: str, boot_id: str) -> Member | None:
        """As `InferencePool.register`; the process may have taken the place of one that was drained or removed."""
        member = self._pool.register(url, name, boot_id)
        if member is not None and member.state != "draining":
            self.forget(member.url, member.name)
        return member

    def add(self, url: str, name: str | None) -> Member:
        """As `InferencePool.add`."""
        member = self._pool.add(url, name)
        self.forget(member.url, member.name)
        self._kept.added[member.url] = member.name
        self._write()
        return member

    def drain(self, name: str) -> Member:
        """As `InferencePool.drain`."""
        return self._note_left(self._pool.drain(name))

    def remove(self, name: str) -> Member:
        """As `InferencePool.remove`."""
        return self._note_left(self._pool.remove(name))

    def _note_left(self, member: Member) -> Member:
        self._kept.added.pop(member.url, None)
        self._kept.left[member.name] = Left(member.url, member.entry.registered_as)
        self._write()
        return member

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_file(self._path, msgspec.json.encode(self._kept).decode())
        except WriteFailed as error:
            # It has been carried out; only the next producer would not know.
            log.error("an order to the fleet is not kept for the run's next start: %s", error)
