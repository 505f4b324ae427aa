"""Stores of members of a rendezvous that have a fault there."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from async_rl.errors import PublishError
from async_rl.shared.weights.store import PLACE, RendezvousStore
from async_rl.shared.weights.store_wire import Place


def lose(store: RendezvousStore) -> RendezvousStore:
    """The same store, which tells it who has come, and takes its address, but gives no other's: the member is lost in
    the midst of the rendezvous."""

    def lost() -> None:
        raise PublishError("the connection was reset")

    return before_addresses(store, lost)


def slow(store: RendezvousStore) -> RendezvousStore:
    """The same store, which takes half a second to tell it anything but who has come."""
    return before_addresses(store, lambda: time.sleep(0.5))


def unreachable(store: RendezvousStore) -> RendezvousStore:
    """The same store, in which this member's place is a port at which nobody listens, as behind a firewall."""
    ask = store._ask

    def ask_with_closed_port(request: Mapping[str, Any]) -> Any:
        if request["op"] == "set" and PLACE.fullmatch(request["key"]):
            place = Place(address=store.address, port=1, name=f"async-rl-{'0' * 32}")
            request = {**request, "value": place.model_dump_json().encode().hex()}
        return ask(request)

    store._ask = ask_with_closed_port
    return store


def before_addresses(store: RendezvousStore, act: Callable[[], object]) -> RendezvousStore:
    """The same store, which calls `act` whenever it is asked for anything but who has come."""
    ask = store._ask

    def ask_after(request: Mapping[str, Any]) -> Any:
        if request["op"] in ("get", "wait") and not all(key.startswith("present/") for key in _keys_of(request)):
            act()
        return ask(request)

    store._ask = ask_after
    return store


def _keys_of(request: Mapping[str, Any]) -> list[str]:
    keys: list[str] = request.get("keys", [request.get("key", "")])
    return keys
