"""The hub is looked for once, and for some seconds only; no request leaves this machine."""

import socket
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from async_rl.checks.preflight import model
from async_rl.checks.preflight.model import ModelFiles
from async_rl.errors import ConfigError
from async_rl.shared.net import hub
from async_rl.shared.net.hub import hub_fault


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    for cached in (hub_fault, model._from_hub):
        cached.cache_clear()
    yield
    for cached in (hub_fault, model._from_hub):
        cached.cache_clear()


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)


def test_a_hub_that_refuses_is_one_line_and_only_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # Not listening: a connection is refused.
        at(monkeypatch, f"http://127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(
            ConfigError, match=r"the hub at http://127\.0\.0\.1:\d+ cannot be reached \(Connection ref"
        ) as e:
            ModelFiles.find("nobody/nothing")
    assert "\n" not in str(e.value) and constants.HF_HUB_OFFLINE


def test_a_name_that_no_resolver_answers_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = threading.Event()
    monkeypatch.setattr(hub, "LIMIT_S", 0.1)
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: ending.wait(60) and socket.socket())
    at(monkeypatch, "https://hub.invalid")
    try:
        assert "https://hub.invalid cannot be reached (no answer within 0.1 s)" in (hub_fault() or "")
    finally:
        ending.set()


def test_a_proxy_is_what_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://127.0.0.1:1"})
    at(monkeypatch, "https://hub.invalid")
    assert "the proxy 127.0.0.1:1, on the way to the hub at https://hub.invalid, cannot be reached" in (
        hub_fault() or ""
    )


def test_a_hub_that_answers_or_is_not_to_be_asked_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_fault() is None and not constants.HF_HUB_OFFLINE
    hub_fault.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_fault() is None
