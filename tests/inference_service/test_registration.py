"""An instance and a fleet endpoint that is scripted here: registering, being let go, asking for it."""

import itertools
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError, FleetLost
from inference_service import registration as registration_module
from inference_service.registration import FIRST_INTERVAL_S, LEAVING_INTERVAL_S, Registration, default_name
from tests.support.clock import Clock
from tests.support.waiting import wait_for

OWN_URL = "http://127.0.0.1:9"


class Fleet:
    """The trainer's endpoint; it lets a drained instance go when `is_busy` is cleared."""

    def __init__(self, token: str | None = None, listener: socket.socket | None = None) -> None:
        """`listener` is one that listens already."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.token = token
        self.leave = False
        self.is_draining = False
        self.is_busy = False
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, answer = fleet.answer(self.path, body, self.headers.get("authorization"))
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=listener is None)
        if listener is not None:
            self._server.socket.close()
            self._server.socket = listener
        self.port = self._server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any], authorization: str | None) -> tuple[int, dict[str, Any]]:
        if self.token is not None and authorization != f"Bearer {self.token}".encode().decode("latin-1"):
            return 401, {"error": {"message": "missing or wrong bearer token", "type": "Unauthorized", "code": 401}}
        self.calls.append((path, body))
        if path == "/fleet/drain":
            self.is_draining = True
        leave = self.leave or (self.is_draining and not self.is_busy)
        return 200, {"state": "draining" if self.is_draining else "ready", "leave": leave, "interval_s": 0.3}

    def registrations(self) -> list[dict[str, Any]]:
        return [body for path, body in self.calls if path == "/fleet/register"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.leave = True
    fleet.close()


class Waits(Clock):
    """A clock on which a registration waits; `after` is called after each wait with their number."""

    def __init__(self, after: Callable[[int], object] = lambda number: None) -> None:
        super().__init__()
        self.waits_s: list[float] = []
        self._after = after

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        self.sleep(timeout_s)
        self._after(len(self.waits_s))
        return event.is_set()

    def runs(self, fleet: str, **options: Any) -> Registration:
        """A registration from its start to its end."""
        registration = Registration(fleet, OWN_URL, "mine", clock=self, wait=self.wait, **options)
        registration._run()
        return registration


def test_it_registers_at_once_and_again_at_the_interval_the_answer_names(fleet: Fleet) -> None:
    at = []

    def after(number: int) -> None:
        at.append(len(fleet.registrations()))
        fleet.leave = number == 3

    clock = Waits(after)
    clock.runs(fleet.url + "/")
    assert at == [1, 2, 3, 4] and clock.waits_s == [0.3] * 4


def test_it_tells_who_it_is_and_is_the_same_process_each_time(fleet: Fleet) -> None:
    Registration(fleet.url + "/", OWN_URL + "/", "first").start()
    wait_for(lambda: len(fleet.registrations()) >= 3)
    body = fleet.registrations()[0]
    assert (body["url"], body["name"]) == (OWN_URL, "first")
    assert len({body["boot_id"] for body in fleet.registrations()}) == 1


def test_each_start_has_a_boot_id_of_its_own(fleet: Fleet) -> None:
    for _ in range(2):
        Registration(fleet.url, OWN_URL, "again").start()
    wait_for(lambda: len({body["boot_id"] for body in fleet.registrations()}) == 2)


def test_it_stops_when_the_fleet_lets_it_go(fleet: Fleet) -> None:
    registration = Registration(fleet.url, OWN_URL, "drained")
    registration.start()
    wait_for(lambda: len(fleet.registrations()) > 0)
    assert not registration.leave_requested.is_set()
    fleet.leave = True
    assert registration.leave_requested.wait(60)
    wait_for(lambda: not any(thread.name == "registration of drained" for thread in threading.enumerate()))


def test_it_waits_for_a_trainer_that_is_away_and_tells_only_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inference_service")
    deaf = socket.create_server(("127.0.0.1", 0))
    port = deaf.getsockname()[1]
    registration = Registration(f"http://127.0.0.1:{port}", OWN_URL, "patient")
    registration.start()
    for _ in range(3):
        deaf.accept()[0].close()
    back = Fleet(listener=deaf)
    wait_for(lambda: len(back.registrations()) >= 2)
    back.leave = True
    assert registration.leave_requested.wait(60)
    back.close()
    said = [record.message for record in caplog.records]
    # Tried at least three times; a line for each other reason, none for the same one again.
    assert all(line != following for line, following in itertools.pairwise(said))
    assert all("trying on" in line for line in said[:-2])
    assert "registered" in said[-2] and "let patient go" in said[-1]


def test_a_wrong_token_is_a_warning_and_a_right_one_may_be_of_any_letters(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(token="źle?")
    wrong = Registration(fleet.url, OWN_URL, "wrong", "guess")
    wrong.start()
    wait_for(lambda: any("ASYNC_RL_TOKEN" in record.message for record in caplog.records))
    assert not fleet.calls
    Registration(fleet.url, OWN_URL, "right", "źle?").start()
    wait_for(lambda: len(fleet.registrations()) > 0)
    fleet.token, fleet.leave = None, True
    assert wrong.leave_requested.wait(60)
    fleet.close()


def test_leave_asks_to_be_drained_and_waits_until_nothing_is_under_way(fleet: Fleet) -> None:
    fleet.is_busy = True
    clock = Waits()
    registration = Registration(fleet.url, OWN_URL, "leaver", clock=clock, wait=clock.wait)
    assert not registration.leave(60.0)
    assert ("/fleet/drain", {"name": "leaver"}) in fleet.calls
    assert 60.0 < clock.passed_s < 60.0 + 2 * LEAVING_INTERVAL_S
    at = len(clock.waits_s) + 100

    def after(number: int) -> None:
        fleet.is_busy = number < at

    clock._after = after
    assert registration.leave(60.0) and clock.waits_s == [LEAVING_INTERVAL_S] * (at + 1)


def test_leave_ends_at_once_where_no_fleet_answers() -> None:
    gone = Fleet()
    gone.close()
    clock = Waits()
    assert not Registration(gone.url, OWN_URL, "alone", clock=clock, wait=clock.wait).leave(30)
    assert clock.waits_s == []


@pytest.mark.parametrize(
    ("fleet_url", "own_url", "name"),
    [
        ("trainer:9", OWN_URL, None),
        ("htp://t:9", OWN_URL, None),
        ("http://t:9", "127.0.0.1:9", None),
        ("http://t:9", OWN_URL + "/v1", None),
        ("http://t:9", OWN_URL, "a b"),
    ],
)
def test_what_cannot_be_registered_is_a_config_error(fleet_url: str, own_url: str, name: str | None) -> None:
    with pytest.raises(ConfigError, match="--"):
        Registration(fleet_url, own_url, name)


def test_the_default_name_is_host_and_port() -> None:
    assert default_name("http://10.0.0.7:8000") == "10.0.0.7-8000"
    assert default_name("http://[::1]:8000") == "1-8000"


@pytest.fixture
def registered(
    start_process: Callable[..., Any], ready: Callable[..., Any], tiny_model: Callable[..., Path], fleet: Fleet
) -> Any:
    """A real server that has joined the fleet."""
    arguments = ("--model", str(tiny_model("qwen3")), "--port", "0", "--register", fleet.url, "--name", "tiny")
    instance = ready(start_process(*arguments))
    wait_for(lambda: len(fleet.registrations()) > 0)
    assert fleet.registrations()[0] | {"boot_id": ""} == {"url": instance.url, "name": "tiny", "boot_id": ""}
    return instance


@pytest.mark.distributed
def test_a_server_that_its_fleet_lets_go_ends_with_code_0(registered: Any, fleet: Fleet) -> None:
    fleet.leave = True
    assert registered.process.wait(timeout=240) == 0


@pytest.mark.distributed
def test_a_signal_asks_for_leave_and_the_server_serves_until_it_gets_it(registered: Any, fleet: Fleet) -> None:
    fleet.is_busy = True
    registered.process.send_signal(signal.SIGTERM)
    wait_for(lambda: fleet.is_draining)
    registered.generate([5, 6], max_tokens=3)
    assert registered.process.poll() is None
    fleet.is_busy = False
    assert registered.process.wait(timeout=240) == 0


@pytest.mark.distributed
def test_a_second_signal_ends_the_server_at_once(registered: Any, fleet: Fleet) -> None:
    fleet.is_busy = True
    registered.process.send_signal(signal.SIGINT)
    wait_for(lambda: fleet.is_draining)
    registered.process.send_signal(signal.SIGTERM)
    assert registered.process.wait(timeout=240) == 0


@pytest.mark.distributed
def test_all_interfaces_are_registered_as_the_address_on_the_way_to_the_fleet(
    start_process: Callable[..., Any], tiny_model: Callable[..., Path], fleet: Fleet
) -> None:
    start_process("--model", str(tiny_model("qwen3")), "--port", "0", "--host", "0.0.0.0", "--register", fleet.url)
    wait_for(lambda: len(fleet.registrations()) > 0, timeout_s=240)
    assert fleet.registrations()[0]["url"].startswith("http://127.0.0.1:")


@pytest.mark.distributed
def test_a_register_url_that_is_none_ends_with_code_2(
    start_process: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    process = start_process("--model", str(tiny_model("qwen3")), "--port", "0", "--register", "http://[::1:9")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2 and "--register" in output and "Traceback" not in output


def say(run_dir: Path, fleet: Fleet) -> None:
    (run_dir / "fleet.json").write_text(json.dumps({"url": fleet.url}))


def test_a_run_directory_is_followed_to_whatever_host_its_trainer_is_on(tmp_path: Path, fleet: Fleet) -> None:
    run_dir = tmp_path / "run"
    registration = Registration(str(run_dir), lambda fleet_url: f"http://way-to-{fleet_url[-5:]}:9", "mine")
    registration.start()
    run_dir.mkdir()
    say(run_dir, fleet)
    wait_for(lambda: len(fleet.registrations()) > 0)
    second = Fleet()
    say(run_dir, second)
    wait_for(lambda: len(second.registrations()) > 0)
    num_before = len(fleet.registrations())
    wait_for(lambda: len(second.registrations()) > 2)
    assert len(fleet.registrations()) <= num_before + 1
    bodies = [fleet.registrations()[0], second.registrations()[0]]
    assert [body["url"] for body in bodies] == [f"http://way-to-{each.url[-5:]}:9" for each in (fleet, second)]
    assert bodies[0]["boot_id"] == bodies[1]["boot_id"]
    second.leave = True
    assert registration.leave_requested.wait(60)
    registration.require_fleet()
    second.close()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"url": "no url"}', '{"url": 7}', "\xff"])
def test_a_directory_without_a_valid_address_is_tried_on(
    tmp_path: Path,
    fleet: Fleet,
    content: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration_module, "FIRST_INTERVAL_S", 0.1)
    caplog.set_level(logging.INFO, "inference_service")
    (tmp_path / "fleet.json").write_text(content, "latin-1")
    registration = Registration(str(tmp_path), OWN_URL, "mine")
    registration.start()
    wait_for(lambda: "does not hold the address of a fleet" in caplog.text)
    say(tmp_path, fleet)
    wait_for(lambda: len(fleet.registrations()) > 0)
    fleet.leave = True
    assert registration.leave_requested.wait(60)


def test_patience_ends_when_no_fleet_has_answered_for_so_long(tmp_path: Path) -> None:
    clock = Waits()
    registration = clock.runs(str(tmp_path), patience_s=3.0)
    assert registration.leave_requested.is_set() and clock.waits_s == [FIRST_INTERVAL_S] * 2
    with pytest.raises(FleetLost, match=r"no fleet has answered at --register .* for --patience-s 3: this instance"):
        registration.require_fleet()


def test_a_fleet_that_answers_ends_no_patience_though_it_refuses() -> None:
    for each in (Fleet(token="other"), Fleet()):

        def after(number: int, each: Fleet = each) -> None:
            if number == 200:
                each.token, each.leave = None, True

        clock = Waits(after)
        registration = clock.runs(each.url, patience_s=0.9)
        assert len(clock.waits_s) == 201 and clock.passed_s > 60.0
        registration.require_fleet()
        each.close()


def test_time_in_which_the_process_was_stopped_is_not_waited_for(tmp_path: Path) -> None:
    def after(number: int) -> None:
        clock.now_s += 3600.0

    clock = Waits(after)
    clock.runs(str(tmp_path), patience_s=30.0)
    assert len(clock.waits_s) == 5, "each counts for the interval and the time of an answer, 7 s"


@pytest.mark.distributed
def test_an_instance_whose_patience_has_ended_ends_with_code_3_and_says_why(
    start_process: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = ("--register", str(tmp_path), "--patience-s", "1")
    process = start_process("--model", str(tiny_model("qwen3")), "--port", "0", *arguments)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 3 and "--patience-s 1: this instance ends" in output and "Traceback" not in output
