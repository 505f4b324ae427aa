"""Stores of members of a rendezvous that have a fault there."""

import time
from collections.abc import Mapping
from typing import Any

from async_rl.errors import PublishError
from async_rl.shared.weights.store import RendezvousStore


def lose(store: RendezvousStore) -> RendezvousStore:
    """The same store, which tells it who has come, and takes its address, but gives no other's: the member is lost in
    the midst of the rendezvous."""
    ask = store._ask

    def ask_no_more(request: Mapping[str, Any]) -> Any:
        if request["op"] in ("get", "wait") and not all(key.startswith("present/") for key in _keys_of(request)):
            raise PublishError("the connection was reset")
        return ask(request)

    store._ask = ask_no_more
    return store


def slow(store: RendezvousStore) -> RendezvousStore:
    """The same store, which takes half a second to tell it anything but who has come."""
    ask = store._ask

    def ask_slowly(request: Mapping[str, Any]) -> Any:
        if request["op"] in ("get", "wait") and not all(key.startswith("present/") for key in _keys_of(request)):
            time.sleep(0.5)
        return ask(request)

    store._ask = ask_slowly
    return store


def _keys_of(request: Mapping[str, Any]) -> list[str]:
    keys: list[str] = request.get("keys", [request.get("key", "")])
    return keys
