"""The connections of a chain: each member of a weight group accepts that of the next one.

    next: proof -> this one: proof

Both are of the group's store (`RendezvousStore.proofs`), so nobody else is let in, or holds up who is invited. Members
of one host meet at a socket of that host, where bytes cost about half the processor time of loopback.
"""

import hmac
import secrets
import selectors
import socket
import sys
import time
from contextlib import ExitStack
from datetime import timedelta

from async_rl.errors import PublishError
from async_rl.shared.protocol.group_errors import unreached
from async_rl.shared.weights.store import ENDED, MAX_STRANGERS, RendezvousStore
from async_rl.shared.weights.store_wire import PROOF_BYTES, NotInvited, Place, listen, receive_exactly

ATTEMPT_S = 2.0
"""For a connection, before the next attempt: by then its packets would be sent again seldom only."""

LOOK_S = 0.05
"""How often it is looked whether the host has ended the rendezvous, and between attempts."""

BACKLOG = 16

BUFFER_BYTES = 4 * 2**20
"""On one host, if the kernel allows it: fewer wake-ups for each piece."""

NAMES_SOCKETS = sys.platform == "linux"
"""Whether a socket of this host may have a name that is no file, in its network namespace."""


def connect(
    store: RendezvousStore, rank: int, world_size: int, timeout_s: float
) -> tuple[socket.socket | None, socket.socket | None]:
    """The connections to the ranks before and after this one; returns when all members have theirs.

    Raises:
        NotInvited: an uninvited process is in the place of the rank before.
        PublishError: they did not all connect within the timeout, the host ended the rendezvous, or this member cannot
            listen at its address.
    """
    deadline = time.monotonic() + timeout_s
    shows, expects = store.proofs()
    before = after = None
    with ExitStack() as open_sockets:
        try:
            listeners = _listen(store, rank, open_sockets) if rank < world_size - 1 else []
            if rank > 0:
                before = _reach(store, rank - 1, deadline, timeout_s / 2)
                before.sendall(_of(shows, rank - 1))
            if listeners:
                after = _accept(listeners, store, rank + 1, _of(expects, rank + 1), deadline)
                if after.family == socket.AF_UNIX:
                    # It has as much room as was asked for, while TCP finds out itself.
                    after.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                else:
                    # The end of a message would wait for the acknowledgement of what came before: 40 ms.
                    after.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                after.sendall(_of(shows, rank + 1))
            if before is not None:
                proof = receive_exactly(before, PROOF_BYTES, deadline)
                if not hmac.compare_digest(proof, _of(expects, rank - 1)):
                    raise NotInvited(f"whoever is connected as rank {rank - 1} is not who was invited as this rank")
            store.set(_linked(rank), "")
            left_s = max(deadline - time.monotonic(), LOOK_S)
            store.wait([_linked(other) for other in range(world_size)], timedelta(seconds=left_s))
        except BaseException as error:
            how = ENDED if store.has_ended() else f"a rank beside this one ended the connection: {error}"
            # First, as in `WeightGroup.close`: before those fail whose connections end here.
            store.close()
            for each in (before, after):
                if each is not None:
                    each.close()
            if isinstance(error, OSError):
                raise PublishError(how) from error
            raise
    return before, after


def _of(proofs: bytes, rank: int) -> bytes:
    return proofs[rank * PROOF_BYTES : (rank + 1) * PROOF_BYTES]


def _place(rank: int) -> str:
    return f"chain/{rank}"


def _linked(rank: int) -> str:
    return f"chain/linked/{rank}"


def _listen(store: RendezvousStore, rank: int, open_sockets: ExitStack) -> list[socket.socket]:
    """Says where the next rank finds this one: an address of TCP, and a name on this host where it has such names."""
    name = f"async-rl-{secrets.token_hex(16)}"
    try:
        listeners = [open_sockets.enter_context(listen(store.address, BACKLOG))]
        if NAMES_SOCKETS:
            listeners.append(open_sockets.enter_context(socket.socket(socket.AF_UNIX)))
            listeners[-1].bind(f"\0{name}")
            listeners[-1].listen(BACKLOG)
    except OSError as error:
        raise PublishError(f"cannot listen at {store.address}: {error}") from error
    place = Place(address=store.address, port=listeners[0].getsockname()[1], name=name)
    store.set(_place(rank), place.model_dump_json())
    return listeners


def _reach(store: RendezvousStore, rank: int, deadline: float, patience_s: float) -> socket.socket:
    """Tries for `patience_s` from when it knows where: one that cannot, as behind a firewall, leaves before the others'
    time is over, so that it alone is lost."""
    left_s = max(deadline - time.monotonic(), LOOK_S)
    store.wait([_place(rank)], timedelta(seconds=left_s))
    deadline = min(deadline, time.monotonic() + patience_s)
    # The host has checked it.
    place = Place.model_validate_json(store.get(_place(rank)))
    if NAMES_SOCKETS and place.address == store.address:
        connection = socket.socket(socket.AF_UNIX)
        # Otherwise it waits for ever at one that accepts nothing.
        connection.settimeout(ATTEMPT_S)
        try:
            connection.connect(f"\0{place.name}")
            return connection
        except OSError:
            # The same address in another network namespace.
            connection.close()
    while True:
        try:
            attempt_s = min(ATTEMPT_S, max(deadline - time.monotonic(), LOOK_S))
            connection = socket.create_connection((place.address, place.port), attempt_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as error:
            if store.has_ended():
                raise PublishError(ENDED) from error
            if time.monotonic() > deadline:
                raise PublishError(unreached(rank, f"{place.address}:{place.port}", error)) from error
        time.sleep(LOOK_S)


def _accept(
    listeners: list[socket.socket], store: RendezvousStore, rank: int, expected: bytes, deadline: float
) -> socket.socket:
    """The first connection that shows this proof; all others are closed."""
    said: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector, ExitStack() as at_end:

        def forget(stranger: socket.socket) -> None:
            del said[stranger]
            selector.unregister(stranger)
            stranger.close()

        @at_end.callback
        def forget_all() -> None:
            for each in tuple(said):
                forget(each)

        for each in listeners:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        while time.monotonic() < deadline and not store.has_ended():
            for key, _ in selector.select(LOOK_S):
                ready: socket.socket = key.fileobj  # type: ignore[assignment]
                if ready in listeners:
                    try:
                        stranger, _ = ready.accept()
                        stranger.setblocking(False)
                        said[stranger] = b""
                        selector.register(stranger, selectors.EVENT_READ)
                    except OSError:
                        # There may be no descriptor for it.
                        time.sleep(LOOK_S)
                    if len(said) > MAX_STRANGERS:
                        forget(next(iter(said)))
                elif ready in said and not (part := _said_by(ready, PROOF_BYTES - len(said[ready]))):
                    forget(ready)
                elif ready in said:
                    said[ready] += part
                    if hmac.compare_digest(said[ready], expected):
                        del said[ready]
                        return ready
                    if len(said[ready]) == PROOF_BYTES:
                        forget(ready)
    if store.has_ended():
        raise PublishError(ENDED)
    raise PublishError(f"rank {rank} did not connect to this one at {store.address}")


def _said_by(stranger: socket.socket, num_bytes: int) -> bytes:
    """What it has sent; nothing if it has gone."""
    try:
        return stranger.recv(num_bytes)
    except OSError:
        return b""
