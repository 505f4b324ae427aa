"""A member that is lost in the midst of a rendezvous: the others know its address, it does not connect to theirs."""

from collections.abc import Mapping
from typing import Any

from async_rl.errors import PublishError
from async_rl.shared.weights.store import RendezvousStore


def lose(store: RendezvousStore) -> RendezvousStore:
    """The same store, which tells it who has come, and takes its address, but gives no other's."""
    ask = store._ask

    def ask_no_more(request: Mapping[str, Any]) -> Any:
        keys = request.get("keys", [request.get("key", "")])
        if request["op"] in ("get", "wait") and not all(key.startswith("present/") for key in keys):
            raise PublishError("the connection was reset")
        return ask(request)

    store._ask = ask_no_more
    return store
