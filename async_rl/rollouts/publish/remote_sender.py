"""The sender of the weights in another process than the control side of a publish: both ends of its calls.

`RemoteSender` asks, and `serve` answers where the weights are. What carries a call between them keeps numbers as they
are, NaN and infinite ones too: msgpack does, JSON by msgspec does not. It carries errors, too: see `producer.frames`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import get_annotations
from typing import Any, TypeVar

import msgspec

from async_rl.errors import LeaderFailed
from async_rl.shared.protocol.sender import Content, Forming, Invitations, Sender, SenderFacts, Sent

T = TypeVar("T")

Call = Callable[[str, list[Any]], Any]
"""(name of a method of `Sender`, its arguments) -> what `serve` returned at the other end, or raises its error.

One at a time."""

METHODS = {name: get_annotations(method) for name, method in vars(Sender).items() if not name.startswith("_")}
"""The types of arguments and result of each method, by name."""


class RemoteSender:
    """A `Sender` whose methods are called at the other end; they raise what `call` does."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def facts(self) -> SenderFacts:
        return self._facts

    def watch(self) -> None:
        self._ask(type(None), "watch")

    def form(self, hosts: Sequence[str], sizes: Sequence[int]) -> Invitations:
        return self._ask(Invitations, "form", hosts, sizes)

    def wait_formed(self, timeout_s: float) -> Forming:
        return self._ask(Forming, "wait_formed", timeout_s)

    def call_off(self, without: Sequence[int]) -> str:
        return self._ask(str, "call_off", without)

    def wait_accepted(self, timeout_s: float) -> list[int]:
        return self._ask(list[int], "wait_accepted", timeout_s)

    def send(self, version: str, content: Content) -> Sent:
        return self._ask(Sent, "send", version, content)

    def write_snapshot(self, version: str, content: Content) -> Sent:
        return self._ask(Sent, "write_snapshot", version, content)

    def leave_group(self) -> None:
        self._ask(type(None), "leave_group")

    def change(self, strengths: Mapping[str, int]) -> None:
        self._ask(type(None), "change", strengths)

    def score(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._ask(list[list[float]], "score", list(prompt), [list(each) for each in responses])

    @cached_property
    def _facts(self) -> SenderFacts:
        return self._ask(SenderFacts, "facts")

    def _ask(self, kind: type[T], name: str, *arguments: object) -> T:
        answer = self._call(name, msgspec.to_builtins(list(arguments)))
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise LeaderFailed(f"the main training rank answered {name} with {answer!r:.200}: {error}") from error


def serve(sender: Sender, name: str, arguments: Sequence[Any]) -> Any:
    """Calls a method of `sender` with arguments that came from the other end; returns its result as plain data.

    Raises:
        ValueError: it has no such method, or not with such arguments.
        Exception: what the method raises.
    """
    types = METHODS.get(name)
    if types is None or len(arguments) != len(types) - 1:
        raise ValueError(f"a sender has no method {name!r} with {len(arguments)} arguments: expected {list(METHODS)}")
    # msgspec.ValidationError is a ValueError.
    given = [msgspec.convert(each, kind) for each, kind in zip(arguments, types.values(), strict=False)]
    return msgspec.to_builtins(getattr(sender, name)(*given))
