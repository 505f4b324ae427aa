"""The weight transport, both ends of it: a group of one sender and all receivers, and buckets.

The trainer's first rank is rank 0 and the only source; every worker of every inference instance is one more rank.
Tensors are sent in a given order by a chain of sockets (`chain.py`), by broadcasts of nccl or hccl, or from device to
device of one host (`ipc.py`): on a CPU large ones alone, directly between their own memory, small ones packed into
buckets; between devices all are packed. A message is hashed (`fingerprint.py`) as it passes the chain, or, on a device,
while another one is sent. Before each update every receiver announces through the group's store that it accepted the
list of tensors, and waits there; the sender broadcasts only then, so a refused list blocks nobody in a collective. It
may announce the fingerprint of what it holds: if all hold what the sender sent last, what changed since may be sent
alone (`changes.py`).
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, cast

import torch

from async_rl.errors import PublishError
from async_rl.shared.protocol.group_errors import BROKE
from async_rl.shared.weights.chain import Chain, Passage
from async_rl.shared.weights.changes import LastSent, apply, front
from async_rl.shared.weights.choice import Choice
from async_rl.shared.weights.collectives import Collectives, current_device, open_collectives
from async_rl.shared.weights.fingerprint import TensorSpec, fingerprint_on
from async_rl.shared.weights.in_flight import Message, bytes_of, copy_to_destinations, is_full
from async_rl.shared.weights.ipc import HandOver
from async_rl.shared.weights.messages import messages
from async_rl.shared.weights.pulse import Pulse
from async_rl.shared.weights.store import RendezvousStore
from async_rl.shared.weights.store_wire import NotInvited

WAIT, GO, CHANGES = "wait", "go", "changes "
"""What the sender says: it looks for changes, and says something again in time; it sends all, or so many bytes of
changes."""


def _presence(rank: int) -> str:
    return f"present/{rank}"


ACCEPTANCE_TIMEOUTS = 2
"""How many timeouts a receiver waits for the others to accept: more than the sender, who knows whom to blame."""


class WeightGroup:
    """The process group of one trainer rank (0) and all receiving workers (1 .. world_size - 1).

    It is separate from the default group of either process. Every wait ends within `timeout_s` in a PublishError.
    After any error the group is unusable on all ends: close it and open a new one.
    """

    def __init__(
        self,
        store: RendezvousStore,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        device: torch.device | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Returns when all members have connected and proven to each other that they were invited.

        Args:
            device: of its tensors; by default the calling thread's current device of the backend's kind.
            pulse: of a process that is in further groups: while it waits in one it does nothing in the others.

        Raises:
            PublishError: they did not all connect within the timeout.
            NotInvited: an uninvited process took the place of a member.
        """
        self._store = store
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._num_updates = self._num_words = 0
        self.num_bytes_sent = 0
        """Sender: of the last stream, to each receiver."""
        self.fingerprint: str | None = None
        """Receiver: of the last stream that has been received."""
        self._num_bytes_of_changes: int | None = None
        """Receiver: what the sender has said of the update that it announced last."""
        self.choice = Choice()
        """Sender: of the two ways to send to receivers that hold what was sent last."""
        self._pulse = pulse or Pulse(timeout_s)
        try:
            store.enter_as(rank)
            store.set(_presence(rank), "here")
            # Before they connect: who does not come is known as absent.
            store.wait([_presence(other) for other in range(world_size)])
            chosen = device or current_device(backend)
            self._collectives: Collectives | Chain | HandOver = (
                HandOver(store, rank, world_size, timeout_s, chosen)
                if backend.endswith("_ipc")
                else open_collectives(store, rank, world_size, backend, timeout_s, chosen)
            )
        except (RuntimeError, OSError, PublishError) as error:
            store.close()
            kind = NotInvited if isinstance(error, NotInvited) else PublishError
            raise kind(
                f"{self._pulse.said()}not all {world_size} members of the weight group met within {timeout_s:g} s, "
                f"this one at {store.address}: {error}"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._collectives.device

    @staticmethod
    def has_come(store: RendezvousStore, rank: int) -> bool:
        """Whether a member has come to the rendezvous, also one that failed there later."""
        return store.check([_presence(rank)])

    def announce(self, rank: int, holds: str = "") -> None:
        """Receiver: announces that this rank accepted the next update; returns when the sender is about to send.

        A sender that is gone by then has broken the broadcast, as one that goes later.

        Args:
            holds: fingerprint of the weights in the tensors that `receive` is given then as destinations, each of which
                is contiguous. Without it, it is sent all.
        """
        self._num_updates += 1
        self._pulse.begin()
        try:
            self._store.set(self._ready(rank), holds)
            said, self._num_words = WAIT, 0
            while said == WAIT:
                # Not in the broadcast, whose time would run out here while another member hangs.
                self._store.wait([self._word()], timedelta(seconds=ACCEPTANCE_TIMEOUTS * self._timeout_s))
                said = self._store.get(self._word()).decode()
                self._num_words += 1
            self._num_bytes_of_changes = int(said.removeprefix(CHANGES)) if said.startswith(CHANGES) else None
        except PublishError as error:
            raise self._broken(f": {error}") from error
        self._pulse.is_at_work(since_last=False)

    def wait_accepted(self, timeout_s: float) -> list[int]:
        """Sender: waits until all ranks have announced the next update, at most `timeout_s`; returns the others."""
        keys = {rank: self._ready(rank, 1) for rank in range(1, self._world_size)}
        with suppress(PublishError):
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def send(
        self, stream: Iterable[tuple[TensorSpec, torch.Tensor]], bucket_bytes: int, last: LastSent | None = None
    ) -> str:
        """Broadcasts all tensors of the stream, in order, and returns their fingerprint; see `num_bytes_sent`.

        A tensor must keep its values until the end of the call. The stream is closed if it could not be sent
        completely, since other ranks may take part in it.

        Args:
            last: what was sent last, in whatever group; is this stream afterwards, or nothing, if all are sent next
                time, too. If all receivers hold it, they are sent what changed where that takes less time
                (`choice.py`).
        """
        self._num_updates += 1
        self._num_words = 0
        self._pulse.begin()
        try:
            if last is None:
                return self._send_all(stream, bucket_bytes)
            before, last.fingerprint = last.fingerprint, None
            hold = {self._store.get(self._ready(rank)).decode() for rank in range(1, self._world_size)}
            if before is not None and hold == {before} and self.choice.begin(last.num_bytes):
                last.fingerprint = self._send_changes(stream, bucket_bytes, last)
                return last.fingerprint
            if not self.choice.keeps:
                return self._send_all(stream, bucket_bytes)
            last.fingerprint = self._send_all(stream, bucket_bytes, last)
            return last.fingerprint
        finally:
            if isinstance(stream, Generator):
                stream.close()

    def _send_all(
        self, stream: Iterable[tuple[TensorSpec, torch.Tensor]], bucket_bytes: int, last: LastSent | None = None
    ) -> str:
        device = self._collectives.device
        fingerprint = fingerprint_on(device)
        lost_s = self.choice.begin_all()
        self._say(GO)

        def take(message: Message) -> None:
            for spec, part in message.tensors():
                message.add(fingerprint, spec, part)
                if last is not None and last.has(spec):
                    last.keep(spec, part)
                elif last is not None:
                    self.choice.do_once(partial(last.keep, spec, part))

        def all_messages() -> Iterator[tuple[torch.Tensor, list[TensorSpec], list[torch.Tensor]]]:
            for items in messages(stream, lambda item: item[0], bucket_bytes, device):
                parts = [bytes_of(tensor, device) for _, tensor in items]
                yield parts[0] if len(parts) == 1 else torch.cat(parts), [spec for spec, _ in items], parts

        self._broadcast(all_messages(), take)
        digest = fingerprint.hexdigest()
        self.choice.sent_all(lost_s)
        return digest

    def _send_changes(
        self, stream: Iterable[tuple[TensorSpec, torch.Tensor]], bucket_bytes: int, last: LastSent
    ) -> str:
        """Or all, where that is about to take less time."""
        device = self._collectives.device
        fingerprint = fingerprint_on(device)
        specs: list[TensorSpec] = []
        numbers: list[int] = []
        parts: list[torch.Tensor] = []
        said_s = time.monotonic()
        rest = iter(stream)
        for spec, tensor in rest:
            if time.monotonic() - said_s > self._timeout_s / 2:
                self._say(WAIT)
                said_s = time.monotonic()
            part = bytes_of(tensor, device)
            changed = last.replace(spec, part, self.choice.goes_on)
            if changed is None:
                parts.clear()
                return self._send_all(chain(last.tensors(specs), [(spec, tensor)], rest), bucket_bytes, last)
            fingerprint.add(spec, part)
            specs.append(spec)
            numbers.append(changed[0])
            parts += changed[1]
        data = torch.cat([front(numbers, device), *parts])
        parts.clear()
        self._say(f"{CHANGES}{data.numel()}")
        self._broadcast((piece, (), None) for piece in data.split(bucket_bytes))
        digest = fingerprint.hexdigest()
        self.choice.sent_changes()
        return digest

    def _broadcast(
        self,
        some: Iterable[tuple[torch.Tensor, Sequence[TensorSpec], Sequence[torch.Tensor] | None]],
        take: Callable[[Message], object] = lambda _: None,
        ends: bool = True,
    ) -> None:
        """Sends or receives messages, some at once, and the end of the stream; `take` is called with each: once it has
        passed a chain, which has hashed it, elsewhere meanwhile."""
        in_flight: deque[Message] = deque()
        passes_first = isinstance(self._collectives, Chain)
        self.num_bytes_sent = 0

        def finish(message: Message) -> None:
            self._wait(message.work)
            if passes_first:
                take(message)

        try:
            for data, specs, parts in some:
                in_flight.append(self._start(data, specs, parts))
                self.num_bytes_sent += data.numel()
                if not passes_first:
                    take(in_flight[-1])
                while is_full(in_flight):
                    finish(in_flight.popleft())
            end = self._begin_end() if ends else []
            while in_flight:
                finish(in_flight.popleft())
            for each in end:
                self._wait(each)
        finally:
            if in_flight:
                # An error has left them running, and until the end they write to their buffers.
                self.close()

    def receive(
        self, specs: Sequence[TensorSpec], bucket_bytes: int, into: Mapping[str, torch.Tensor] | None = None
    ) -> Generator[tuple[TensorSpec, torch.Tensor], None, None]:
        """Yields (spec, tensor) in stream order.

        A tensor that `into` has a contiguous destination for (of the spec's dtype and shape, on the group's device) has
        been written there, and is that destination; any other is a view of its message, which it keeps in memory.
        Destinations are written before their tensors are yielded, from the first step on.

        Raises:
            PublishError: the broadcast broke, or what it brought is no stream of these tensors.
        """
        with closing(self.begin_to_receive(specs, bucket_bytes, into)) as found:
            next(found)
            yield from cast(Iterator[tuple[TensorSpec, torch.Tensor]], found)

    def begin_to_receive(
        self, specs: Sequence[TensorSpec], bucket_bytes: int, into: Mapping[str, torch.Tensor] | None = None
    ) -> Generator[tuple[TensorSpec, torch.Tensor] | None, None, None]:
        """As `receive`, but yields None first, once the first messages are on their way."""
        destinations = into or {}
        fingerprint, self.fingerprint = fingerprint_on(self.device), None
        if self._num_bytes_of_changes is not None:
            yield None
            data = torch.empty(self._num_bytes_of_changes, dtype=torch.uint8, device=self.device)
            self._broadcast(((piece, (), None) for piece in data.split(bucket_bytes)), ends=False)
            for spec, tensor in apply(data, specs, destinations):
                fingerprint.add(spec, bytes_of(tensor, self.device))
                yield spec, tensor
            # Only now: the sender compares how long this takes with how long all weights do.
            for each in self._begin_end():
                self._wait(each)
            self.fingerprint = fingerprint.hexdigest()
            return
        in_flight: deque[Message] = deque()
        has_begun = False
        try:
            for message in messages(specs, lambda spec: spec, bucket_bytes, self.device):
                arrived = []
                if not has_begun and is_full(in_flight):
                    has_begun = True
                    yield None
                while is_full(in_flight):
                    arrived.append(in_flight.popleft())
                    self._wait(arrived[-1].work)
                # The next one arrives while these are copied and hashed.
                in_flight.append(self._start(self._room_for(message, destinations), message))
                while arrived:
                    # Without a name, which would keep it in memory while the next ones arrive.
                    yield from copy_to_destinations(arrived.pop(0), destinations, fingerprint)
            end = self._begin_end()
            if not has_begun:
                yield None
            while in_flight:
                last = in_flight.popleft()
                self._wait(last.work)
                yield from copy_to_destinations(last, destinations, fingerprint)
            for each in end:
                self._wait(each)
            self.fingerprint = fingerprint.hexdigest()
        finally:
            if in_flight:
                # An error has left them running, and until the end they write to their buffers.
                self.close()

    def _say(self, word: str) -> None:
        self._store.set(self._word(), word)
        self._num_words += 1

    def _word(self) -> str:
        """The key of what the sender says next of the present update."""
        return f"update/{self._num_updates}/word/{self._num_words}"

    def _ready(self, rank: int, later: int = 0) -> str:
        """Of the present update, or of a later one."""
        return f"update/{self._num_updates + later}/{rank}"

    def _room_for(self, message: Sequence[TensorSpec], destinations: Mapping[str, torch.Tensor]) -> torch.Tensor:
        destination = destinations.get(message[0].name) if len(message) == 1 else None
        if destination is not None and destination.is_contiguous():
            return destination.view(-1).view(torch.uint8)
        return torch.empty(sum(spec.num_bytes for spec in message), dtype=torch.uint8, device=self._collectives.device)

    def close(self) -> None:
        """Closes the connections, which ends the wait of any other member; a second call does nothing.

        That to the store first: the host learns that this one left before others fail because of it.
        """
        self._store.close()
        self._collectives.close()

    def _start(
        self, data: torch.Tensor, specs: Sequence[TensorSpec], parts: Sequence[torch.Tensor] | None = None
    ) -> Message:
        self._pulse.is_at_work(since_last=True)
        try:
            if isinstance(self._collectives, Chain):
                return Message(self._collectives.broadcast(data, is_hashed=len(specs) == 1), data, specs, parts)
            return Message(self._collectives.broadcast(data), data, specs, parts)
        except (RuntimeError, PublishError) as error:
            raise self._broken(f": {error}") from error

    def _begin_end(self) -> list[Passage]:
        """The work of knowing that all members have all messages, where those of the group do not tell."""
        try:
            return [self._collectives.end()] if isinstance(self._collectives, Chain) else []
        except RuntimeError as error:
            raise self._broken(f": {error}") from error

    def _wait(self, work: Any) -> None:
        self._pulse.is_at_work(since_last=True)
        started = time.monotonic()
        try:
            self._collectives.wait(work)
        except RuntimeError as error:
            waited = time.monotonic() - started
            raise self._broken(f" after {waited:.1f} s (timeout {self._timeout_s:g} s): {error}") from error
        self._pulse.is_at_work(since_last=False)

    def _broken(self, how: str) -> PublishError:
        return PublishError(f"{self._pulse.said()}{BROKE}{how}")
