"""The instances of a run as a live view shows them: from its fleet endpoint, or else from its last proof.

One background thread asks every `POLL_S` seconds, so that a view never waits for an answer.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.protocol.fleet import FleetInfo
from async_rl.tracking.natural_order import natural_order
from deploy.cluster.fleet import read_fleet
from deploy.cluster.run_view import JsonlTail

POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One instance; `share` of all response tokens so far, or of the last step's where no fleet answers."""

    name: str
    state: str
    share: float
    tokens_per_s: float | None = None
    num_requests: int | None = None


class PoolWatch:
    """A context for the duration of a view."""

    def __init__(self, run_dir: Path, token: str | None) -> None:
        self._run_dir = run_dir
        self._token = token
        self._proofs = JsonlTail(run_dir / "ledger.jsonl", from_start=True)
        self._last_proof: Mapping[str, Any] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="async-rl-pool-watch", daemon=True)
        self.rows: tuple[PoolRow, ...] = ()
        """The latest; replaced as a whole."""
        self.has_fleet = False
        """Whether the fleet endpoint answered."""

    def __enter__(self) -> "PoolWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    def look(self) -> None:
        """Asks once."""
        for proof in self._proofs.read_new():
            self._last_proof = proof
        fleet = read_fleet(self._run_dir, self._token)
        self.has_fleet = fleet is not None
        self.rows = rows_of_fleet(fleet) if fleet is not None else rows_of_proof(self._last_proof)

    def _poll(self) -> None:
        while not self._ending.is_set():
            self.look()
            self._ending.wait(POLL_S)


def rows_of_fleet(fleet: FleetInfo) -> tuple[PoolRow, ...]:
    total = sum(info.num_tokens for info in fleet.instances)
    rows = [
        PoolRow(info.name, info.state, info.num_tokens / total if total else 0.0, info.tokens_per_s, info.num_requests)
        for info in fleet.instances
    ]
    # What needs attention first.
    return tuple(sorted(rows, key=lambda row: (row.state == "ready", natural_order(row.name))))


def rows_of_proof(proof: Mapping[str, Any]) -> tuple[PoolRow, ...]:
    """From a line of `ledger.jsonl`, which may be of anything."""
    gaps = proof.get("logprob_gaps")
    instances = gaps.get("instances") if isinstance(gaps, dict) else None
    if not isinstance(instances, dict):
        return ()
    tokens = {
        name: each["tokens"]
        for name, each in instances.items()
        if isinstance(each, dict) and isinstance(each.get("tokens"), int)
    }
    total = sum(tokens.values())
    return tuple(
        PoolRow(name, "", tokens[name] / total if total else 0.0) for name in sorted(tokens, key=natural_order)
    )
