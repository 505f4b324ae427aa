"""What `InstanceClient` offers an update, without an instance: notes the calls, and refuses some."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from async_rl.rollouts.instance.dialect import EMBEDDED, Dialect
from async_rl.rollouts.instance.http import InstanceHttp
from async_rl.shared.protocol.sequence import Answer, Call, goes_on


async def carried_out(calls: Sequence[Call], answer: Callable[[Call], Awaitable[Answer]]) -> list[Answer]:
    """The answers of a sequence of calls, up to the one that ends it."""
    answers: list[Answer] = []
    for call in calls:
        answers.append(await answer(call))
        if not goes_on(call, answers[-1]):
            break
    return answers


class UpdatedInstance:
    """
    Args:
        faults: calls that it refuses, or "hangs CALL".
    """

    url = "http://a:1"

    def __init__(
        self,
        *faults: str,
        fingerprints: tuple[str, ...] = ("f",),
        version: str = "v1",
        sleeps: bool = False,
        dialect: Dialect = EMBEDDED,
        base: str = "",
    ) -> None:
        self.calls: list[str] = []
        self.dialect = dialect
        self.changes_to: tuple[str, ...] | None = None
        """Its fingerprints once an update is finished."""
        self._faults = faults
        self._fingerprints = fingerprints
        self._version = version
        self._sleeps = sleeps
        self._base = base

    async def in_order(self, calls: Sequence[Call], timeout_s: float | None) -> tuple[list[Answer], str]:
        return await carried_out(calls, self._answer), "boot"

    def require(self, call: Call, answer: Answer) -> None:
        InstanceHttp(cast(Any, None), self.url).require(call, answer)

    async def is_sleeping(self, timeout_s: float) -> bool:
        self.calls.append("is_sleeping")
        return self._sleeps

    async def wake_up(self, tag: str, timeout_s: float) -> None:
        self.calls.append(f"wake_up?tags={tag}")

    async def base_digest(self, names: Sequence[str], timeout_s: float) -> str:
        self.calls.append("base_digest")
        return self._base

    async def _answer(self, call: Call) -> Answer:
        name = call.path.partition("?")[0].removeprefix("/")
        self.calls.append(call.path.removeprefix("/") if name == "wake_up" else name)
        if name in self._faults:
            return Answer(status=500, body=f"{name} is refused")
        if f"hangs {name}" in self._faults:
            await asyncio.Event().wait()
        if name == "finish_weight_update" and self.changes_to is not None:
            self._fingerprints = self.changes_to
        found = {
            "is_sleeping": {"is_sleeping": self._sleeps},
            "collective_rpc": {"results": self._fingerprints},
            "weight_info": {"weight_version": self._version},
        }
        return Answer(status=200, body=json.dumps(found.get(name, {})))
