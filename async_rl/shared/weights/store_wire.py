"""Connections of a weight store: how both ends prove that they know a member's secret, and the frames after that.

    host: nonce -> member: nonce, proof over both -> host: proof over both -> requests and responses

Proofs are HMACs under that secret, frames are a length and JSON; nothing is encrypted.
"""

import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, ValidationError

from async_rl.errors import PublishError
from async_rl.shared.protocol.body import StrictBody

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
REFUSED: Final = bytes(PROOF_BYTES)
"""Sent instead of a proof if the other end's was wrong."""

MAX_FRAME_BYTES: Final = 16 * 2**20
MIN_WAIT_S: Final = 0.05

ANSWER_MARGIN_S: Final = 5.0
"""For the host to answer, beyond what a request itself may wait."""

_LENGTH: Final = struct.Struct("!I")


class NotInvited(PublishError):
    """The other end does not know the secret of the invitation."""


def _require_address(text: str) -> str:
    """Raises ValueError for a name, the look-up of which has no time limit."""
    ip_address(text)
    return text


class Place(StrictBody):
    """Where the next rank of a chain finds a member: over TCP, and by the name of a socket of its host."""

    address: Annotated[str, AfterValidator(_require_address)]
    port: int = Field(ge=1, le=65535, strict=True)
    name: str = Field(pattern="^async-rl-[0-9a-f]{32}$")


def require_place(value: bytes, connection: socket.socket) -> None:
    """
    Raises:
        PublishError: what the member at this connection says of its place is none, or on another host.
    """
    try:
        place = Place.model_validate_json(value)
    except ValidationError as error:
        raise PublishError(f"what a member says of its place is not valid: {error}") from error
    peer = str(connection.getpeername()[0])
    if ip_address(place.address.partition("%")[0]) != ip_address(peer.partition("%")[0]):
        raise PublishError(
            f"a member at {peer} says that its place is at {place.address}: expected its own address; where addresses "
            "are translated on the way, set publish.transport = 'snapshot'"
        )


def listen(address: str, backlog: int) -> socket.socket:
    """A socket that listens on this address only, on a free port; OSError if it is not an address of this host."""
    family, kind, proto, _, bound = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.bind(bound)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def admit(connection: socket.socket, members: Iterable[str], deadline: float) -> str | None:
    """The host's part: which of the members' secrets the other end knows; one that knows none is sent `REFUSED`.

    Raises:
        OSError: the connection was lost, or the proof did not arrive by the deadline.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(max(MIN_WAIT_S, deadline - time.monotonic()))
    connection.sendall(ours)
    theirs = receive_exactly(connection, NONCE_BYTES, deadline)
    proof = receive_exactly(connection, PROOF_BYTES, deadline)
    known = [each for each in members if hmac.compare_digest(proof, _proof(each, "member", ours, theirs))]
    connection.sendall(_proof(known[0], "host", ours, theirs) if known else REFUSED)
    connection.settimeout(None)
    return known[0] if known else None


def enter(address: str, port: int, secret: str, deadline: float) -> socket.socket:
    """The member's part: a connection on which both ends have proven themselves.

    Raises:
        NotInvited: the two do not have the same secret.
        OSError: no server responds there, or the connection was lost.
    """
    connection = socket.create_connection((address, port), max(MIN_WAIT_S, deadline - time.monotonic()))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = receive_exactly(connection, NONCE_BYTES, deadline)
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + _proof(secret, "member", theirs, ours))
        proof = receive_exactly(connection, PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(secret, "host", theirs, ours)):
            whose = "this member's" if proof == REFUSED else "its own"
            raise NotInvited(f"the weight store at {address}:{port} stays closed: {whose} secret is of another meeting")
    except BaseException:
        connection.close()
        raise
    return connection


def send_frame(connection: socket.socket, body: Any) -> None:
    data = json.dumps(body).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(connection: socket.socket, deadline: float | None) -> Any:
    """
    Raises:
        OSError: the connection was lost, or the frame did not arrive by the deadline.
        ValueError: it is too long, or not JSON.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes, expected {MAX_FRAME_BYTES} at most")
    try:
        return json.loads(receive_exactly(connection, length, deadline))
    except RecursionError as error:
        raise ValueError(f"a frame of {length} bytes is nested too deeply") from error


def shut(connection: socket.socket) -> None:
    """Wakes all threads that wait for it, here and at the other end."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Line:
    """A member's connection: one request at a time, from any thread."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """
        Raises:
            PublishError: the host did not respond, or an awaited key was not set in time.
        """
        deadline = time.monotonic() + request.get("timeout_s", self._timeout_s) + ANSWER_MARGIN_S
        with self._lock:
            try:
                send_frame(self._connection, request)
                answer = receive_frame(self._connection, deadline)
            except (OSError, ValueError) as error:
                self.close()
                raise PublishError(f"the host of the weight group's rendezvous is gone: {error}") from error
        if "error" in answer:
            raise PublishError(answer["error"])
        return answer["answer"]

    def has_ended(self) -> bool:
        """Whether the host has closed the connection. While a request waits for its answer this is not known: the
        request will notice."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # Nothing comes unasked but the end. Unlike `select`, this takes file descriptors above 1023.
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        shut(self._connection)
        self._connection.close()


def proofs_of(key: bytes, rank: int, world_size: int) -> list[str]:
    """What a rank shows each rank over a connection of their own, and what each shows it, under a key that only the
    host has: hex digits."""

    def joined(pairs: Iterable[tuple[int, int]]) -> str:
        return b"".join(hmac.digest(key, f"rank {of} to {to}".encode(), "sha256") for of, to in pairs).hex()

    others = range(world_size)
    return [joined((rank, other) for other in others), joined((other, rank) for other in others)]


def _proof(secret: str, role: str, of_host: bytes, of_member: bytes) -> bytes:
    """Proves that `role` knows the secret, for this connection only."""
    return hmac.digest(secret.encode(), role.encode() + of_host + of_member, "sha256")


def receive_exactly(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    """Receives exactly `num_bytes` bytes; the deadline holds however slowly they arrive."""
    data = b""
    while len(data) < num_bytes:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
