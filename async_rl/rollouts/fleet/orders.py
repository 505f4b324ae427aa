"""Additions, drains and removals by hand, kept for a producer that takes the place of a lost one."""

import logging
from pathlib import Path

import msgspec

from async_rl.errors import WriteFailed
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.shared.files import write_file

log = logging.getLogger(__name__)

ORDERS_FILE = "fleet_orders.json"


class Kept(msgspec.Struct):
    """`lease` is the trainer's that they were given to, `added` has names by URL, `left` boot ids by name."""

    lease: str
    added: dict[str, str] = {}
    left: dict[str, str | None] = {}


class Orders:
    """Carries orders out, and keeps them in a file of the run's directory.

    Args:
        path: the file; None keeps nothing.
        lease: the trainer's.
    """

    def __init__(self, pool: InferencePool, path: Path | None = None, lease: str = "") -> None:
        self._pool = pool
        self._path = path
        self._kept = Kept(lease)

    def repeat(self) -> None:
        """Carries out those that this trainer's lost producer was given."""
        if self._path is None or not self._path.exists():
            return
        kept = msgspec.json.decode(self._path.read_bytes(), type=Kept)
        if kept.lease != self._kept.lease:
            return
        self._kept = kept
        for name, boot_id in kept.left.items():
            self._pool.bar(name, boot_id)
        for url, name in kept.added.items():
            if all(member.url != url for member in self._pool.members):
                self._pool.add(url, name)

    def add(self, url: str, name: str | None) -> Member:
        """As `InferencePool.add`."""
        member = self._pool.add(url, name)
        self._kept.left.pop(member.name, None)
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
        self._kept.left[member.name] = member.entry.registered_as
        self._write()
        return member

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_file(self._path, msgspec.json.encode(self._kept).decode())
        except WriteFailed as error:
            # It has been carried out; only another producer would not know.
            log.error("an order to the fleet is not kept for a producer that takes the place of this one: %s", error)
