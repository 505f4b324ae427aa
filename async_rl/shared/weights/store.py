"""The store for the rendezvous of a weight group: only invited members can connect, read or write.

torch's own `TCPStore` has no authentication, listens on every interface, and lists its keys to any client. This one
listens on one given address, and on each connection both ends first prove that they know the secret of the invitation
(`store_wire.py`), which is sent over the instances' own routes. Each instance has a secret of its own: it enters as its
own ranks only, and no member writes for another one, or for the host. What two ranks prove to each other elsewhere, the
host tells these two (`RendezvousStore.proofs`). Process groups call `RendezvousStore` from any of their threads.
"""

import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Store

from async_rl.errors import PublishError
from async_rl.shared.weights import store_wire
from async_rl.shared.weights.store_wire import (
    Line,
    admit,
    enter,
    listen,
    receive_frame,
    require_place,
    send_frame,
    shut,
)

Request = Mapping[str, Any]
"""`op`, and its arguments: `key` or `keys`, `value` as hex digits, `timeout_s`."""

WRITING = frozenset({"set", "add", "compare_set"})

OWNED = re.compile(
    r"(?:present|chain|chain/linked|update/\d+|ipc/acknowledged/\d+)/(\d+)|ipc/.*|update/.*|lost/.*|formed|\d+",
    re.DOTALL,
)
"""Keys that only the rank in them may write, and those that only the sender may, which is rank 0. Where those of nccl
and hccl meet, the sender says at 0."""

PLACE = re.compile(r"chain/\d+")
"""Keys under which a member says where the next one finds it."""

PROOF_TIMEOUT_S = 5.0
"""How long an unauthenticated connection may stay open."""

MAX_STRANGERS = 64
"""Concurrent connections without a proof; beyond that the oldest ends. A member needs milliseconds to prove itself."""

ENDED = "the rendezvous of the weight group was ended by its host"

RETRY_S = 0.05
"""Between attempts to connect, and to accept where no descriptor is free."""


class _Values:
    """The values set by the members; closing it ends every wait."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def answer(self, request: Request) -> Any:
        """Executes a request: returns bytes as hex digits, a number, a bool, or None.

        Raises:
            PublishError: the awaited keys were not set in time, or the rendezvous has ended.
        """
        with self._changed:
            answer = self._carry_out(request)
            if request["op"] in WRITING:
                self._changed.notify_all()
            return answer

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _carry_out(self, request: Request) -> Any:
        values, key = self._values, request.get("key", "")
        match request["op"]:
            case "wait":
                self._wait(request["keys"], request["timeout_s"])
            case "get":
                self._wait([key], request["timeout_s"])
                return values[key].hex()
            case "check":
                return all(each in values for each in request["keys"])
            case "set":
                values[key] = bytes.fromhex(request["value"])
            case "compare_set":
                if values.get(key, b"") == bytes.fromhex(request["expected"]):
                    values[key] = bytes.fromhex(request["value"])
                return values.get(key, bytes.fromhex(request["expected"])).hex()
            case "add":
                values[key] = str(int(values.get(key, b"0")) + int(request["amount"])).encode()
                return int(values[key])
            case "delete":
                return values.pop(key, None) is not None
            case "count":
                return len(values)
            case op:
                raise ValueError(f"a weight store has no operation {op!r}")
        return None

    def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        def is_over() -> bool:
            return self._is_closed or all(key in self._values for key in keys)

        if not self._changed.wait_for(is_over, timeout_s):
            missing = [key for key in keys if key not in self._values]
            raise PublishError(f"no member has said {', '.join(missing)} within {timeout_s:g} s")
        if self._is_closed:
            raise PublishError(ENDED)


class RendezvousStore(Store):
    """A member's client of the store, as torch's process groups call it.

    `address` is this host's on the route to the other members.
    """

    def __init__(
        self,
        ask: Callable[[Request], Any],
        address: str,
        timeout_s: float,
        has_ended: Callable[[], bool],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.has_ended = has_ended
        """Whether the host has ended the rendezvous; does not wait."""
        self.close = close
        """Disconnects from the rendezvous; does nothing for the host's own client."""
        self.address = address
        self._ask = ask
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._ask({"op": "set", "key": key, "value": _bytes(value).hex()})

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._ask({"op": "get", "key": key, "timeout_s": self._timeout_s}))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._ask({"op": "wait", "keys": keys, "timeout_s": timeout_s})

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask({"op": "check", "keys": keys}))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"op": "add", "key": key, "amount": amount}))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        values = {"expected": _bytes(expected).hex(), "value": _bytes(desired).hex()}
        return bytes.fromhex(self._ask({"op": "compare_set", "key": key} | values))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask({"op": "delete", "key": key}))

    def num_keys(self) -> int:
        return int(self._ask({"op": "count"}))

    def enter_as(self, rank: int) -> None:
        """Makes this connection that of `rank`: the host sets `lost_key(rank)` when it ends, as when its process
        is killed.

        Raises:
            PublishError: another member is that rank, or it is none of the secret's instance.
        """
        self._ask({"op": "set_at_end", "key": lost_key(rank)})

    def proofs(self) -> tuple[bytes, bytes]:
        """What this rank shows each rank in turn, and what each shows this one: `PROOF_BYTES` each, also of itself."""
        shows, expects = self._ask({"op": "proofs"})
        return bytes.fromhex(shows), bytes.fromhex(expects)

    def clone(self) -> "RendezvousStore":
        """Itself: any thread may use it."""
        return self


class StoreServer:
    """Holds the members' values, from its creation until `close`, which ends all waits.

    Args:
        address: of this host; the only one it listens on.
        secrets_of_ranks: from 1 on, one for the workers of an instance. Who proves to know it is one of its ranks.
        secret_of_sender: of rank 0, where that is not in this process.

    Raises:
        PublishError: it is not an address of this host.
    """

    def __init__(self, address: str, secrets_of_ranks: Sequence[str], secret_of_sender: str | None = None) -> None:
        self._address = address
        self._world_size = len(secrets_of_ranks) + 1
        self._secrets = dict(enumerate(secrets_of_ranks, start=1))
        if secret_of_sender is not None:
            self._secrets[0] = secret_of_sender
        self._key = secrets.token_bytes(store_wire.PROOF_BYTES)
        self._values = _Values()
        self._lock = threading.Lock()
        # In the order in which they came.
        self._strangers: dict[socket.socket, None] = {}
        self._members: set[socket.socket] = set()
        self._ranks: set[int] = set()
        self.ended: list[int] = []
        """The ranks whose connections have ended, the first one first."""
        self.has_lost = False
        """Whether there is one, or the host has given up."""
        self.late: list[int] = []
        """The ranks that came afterwards."""
        self._is_closed = False
        try:
            self._listener = listen(address, MAX_STRANGERS)
        except OSError as error:
            raise PublishError(
                f"cannot listen at {address} (publish.master_address): {error}; expected an address of this host"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="async-rl-rendezvous", daemon=True).start()

    def store(self, timeout_s: float) -> RendezvousStore:
        """The host's own client."""
        ask = partial(self._answer, rank=0)
        return RendezvousStore(ask, self._address, timeout_s, lambda: self._is_closed)

    def close(self) -> None:
        """Ends all waits and connections; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            open_sockets = [self._listener, *self._strangers, *self._members]
        self._values.close()
        for each in open_sockets:
            shut(each)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(RETRY_S)
                continue
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                if len(self._strangers) == MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    # Its thread closes it.
                    shut(oldest)
                self._strangers[connection] = None
            threading.Thread(target=self._serve, args=(connection,), name="async-rl-rendezvous", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Any error ends only this one connection: its peer disconnected or sent invalid data.
        with connection, suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError):
            try:
                secret = admit(connection, set(self._secrets.values()), time.monotonic() + PROOF_TIMEOUT_S)
            finally:
                with self._lock:
                    self._strangers.pop(connection, None)
            if secret is None:
                return
            with self._lock:
                self._members.add(connection)
            try:
                self._answer_all(connection, [rank for rank, each in self._secrets.items() if each == secret])
            finally:
                with self._lock:
                    self._members.discard(connection)

    def _answer_all(self, connection: socket.socket, its_ranks: Collection[int]) -> None:
        rank = None
        try:
            while not self._is_closed:
                request = receive_frame(connection, None)
                try:
                    if request["op"] == "set_at_end":
                        rank = self._entering(request["key"], rank, its_ranks)
                        answer: Request = {"answer": None}
                    else:
                        _require_own(request, rank)
                        if request["op"] in WRITING and PLACE.fullmatch(request["key"]):
                            require_place(bytes.fromhex(request["value"]), connection)
                        answer = {"answer": self._answer(request, rank)}
                except PublishError as error:
                    answer = {"error": str(error)}
                send_frame(connection, answer)
        finally:
            if rank is not None:
                self._values.answer({"op": "set", "key": lost_key(rank), "value": ""})
                self.ended.append(rank)
                self.has_lost = True

    def _answer(self, request: Request, rank: int | None) -> Any:
        if request["op"] == "set_at_end":
            # The host's own end ends the store.
            return None
        if request["op"] != "proofs":
            return self._values.answer(request)
        if rank is None:
            raise PublishError("this connection is that of no rank of the weight group")
        return store_wire.proofs_of(self._key, rank, self._world_size)

    def _entering(self, key: str, present: int | None, its_ranks: Collection[int]) -> int:
        """The rank that a connection becomes, which is `present` so far."""
        found = re.fullmatch(r"lost/(0|[1-9]\d{0,8})", key)
        rank = -1 if found is None else int(found[1])
        with self._lock:
            if rank not in its_ranks or present is not None or rank in self._ranks:
                raise PublishError(f"this member cannot be the one of {key!r}, which is taken, or not of its instance")
            self._ranks.add(rank)
            if self.has_lost:
                self.late.append(rank)
        return rank


def _require_own(request: Request, rank: int | None) -> None:
    """
    Raises:
        PublishError: only another rank may write that key, or the sender.
    """
    if request["op"] not in WRITING | {"delete"} or rank == 0:
        return
    found = OWNED.fullmatch(request["key"])
    if found is not None and (found[1] is None or found[1] != str(rank)):
        raise PublishError(f"rank {rank} of the weight group may not write {request['key']!r}")


def lost_key(rank: int) -> str:
    """What the host sets when the connection of that rank's member ends."""
    return f"lost/{rank}"


def join_rendezvous(address: str, port: int, secret: str, timeout_s: float) -> RendezvousStore:
    """Connects a member to the store that a host serves at this address.

    Raises:
        NotInvited: the two do not have the same secret.
        PublishError: no server responds at that address within the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = enter(address, port, secret, deadline)
            break
        except (OSError, UnicodeError) as error:  # UnicodeError: what can be no host name
            if time.monotonic() + RETRY_S > deadline:
                raise PublishError(
                    f"no weight store at {address}:{port} within {timeout_s:g} s: {error}; can this host reach that "
                    "address? The trainer names another one by publish.master_address"
                ) from error
        time.sleep(RETRY_S)
    own_address = str(connection.getsockname()[0])
    line = Line(connection, timeout_s)
    return RendezvousStore(line.ask, own_address, timeout_s, line.has_ended, line.close)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
