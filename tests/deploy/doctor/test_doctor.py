"""The doctor on real conditions: a taken port, few open files, little shared memory, a clock that is wrong."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import time

import pytest

from async_rl.checks.forecast.run_forecast import RunForecast, forecast_run
from async_rl.checks.preflight.model import read_shape
from async_rl.shared.programs.extras import MODULES
from deploy.doctor import devices
from deploy.doctor.__main__ import main, show
from deploy.doctor.clocks import find_clock_facts, servers_of
from deploy.doctor.devices import find_device_facts
from deploy.doctor.finding import Finding
from deploy.doctor.host import find_host_facts
from deploy.doctor.network import find_network_facts, port_finding
from deploy.doctor.versions import find_versions
from deploy.local import start_checks, torch_build
from deploy.local.machine_memory import HostMemory
from deploy.local.memory_fit import GIB
from tests.support.minimal_config import MINIMAL, config_of

PLENTY = HostMemory(64 * GIB, 64 * GIB)


DRIVERS = [
    ("550.54.15", "13.0", True),
    ("580.65.06", "13.0", False),
    ("550.54.15", "12.6", False),
    ("470.1", "12.6", True),
    ("[N/A]", "13.0", False),
    ("550.54.15", None, False),
    ("550.54.15", "99.0", False),
]
"""Driver, CUDA of torch, and whether the doctor warns."""


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def forecast(tiny_model: Callable[..., Path]) -> RunForecast:
    return forecast_run(config_of(), read_shape(tiny_model()))


@contextmanager
def server(date: str | None) -> Iterator[str]:
    """An HTTP server whose answers have this Date, or none; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            if date is not None:
                self.send_header("Date", date)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def test_this_machine_has_what_the_tests_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) in (0, 1)
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "megatron-core", "memory", "disk", "open files", "network"} <= set(found)
    assert found["extra trainer"]["state"] == found["extra serve"]["state"] == "ok"
    # A warning or a fault without a remedy helps nobody.
    assert all(each["remedy"] for each in found.values() if each["state"] in ("warning", "fault"))


def test_a_taken_port_is_a_fault_and_a_free_one_is_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = port_finding("pool.fleet_address", "127.0.0.1", port)
        assert finding.state == "fault" and "is taken" in finding.found and f":{port}" in (finding.remedy or "")
        (tmp_path / "run.toml").write_text(
            MINIMAL.replace("runs/x", f"{tmp_path}/run") + f"[pool]\nfleet_address = '127.0.0.1:{port}'\n"
        )
        assert main([str(tmp_path / "run.toml")]) == 1
        shown = capsys.readouterr().out
        assert f"port {port}" in shown and "(pool.fleet_address) is taken" in shown
    assert port_finding("pool.fleet_address", "127.0.0.1", port).state == "ok"


def test_a_host_that_is_not_ours_cannot_be_bound() -> None:
    # In a network that is reserved for documentation.
    finding = port_finding("pool.fleet_address", "203.0.113.1", 8600)
    assert finding.state == "fault" and "pool.fleet_address" in (finding.remedy or "")


@pytest.mark.distributed
def test_few_open_files_are_a_warning_with_the_command() -> None:
    done = subprocess.run(
        ["bash", "-c", f"ulimit -Sn 64 && exec {sys.executable} -m deploy.doctor --json"],
        capture_output=True,
        text=True,
    )
    found = {each["name"]: each for each in json.loads(done.stdout)}["open files"]
    assert found["state"] == "warning" and found["found"] == "64, 1024 wanted" and "1024" in found["remedy"]


def test_a_full_shared_memory_is_a_fault(tmp_path: Path) -> None:
    # A file system on which nothing is ever free.
    full = by_name(find_host_facts(None, None, PLENTY, Path("/proc")))["shared memory"]
    assert full.state == "fault" and "--shm-size" in (full.remedy or "")
    # Where programs share memory otherwise, as on macOS, there is nothing to say.
    assert "shared memory" not in by_name(find_host_facts(None, None, PLENTY, tmp_path / "none"))


def test_memory_and_disk_are_compared_with_the_run(forecast: RunForecast, tmp_path: Path) -> None:
    config = config_of(run={"dir": str(tmp_path / "none" / "run")})
    assert by_name(find_host_facts(config, forecast, PLENTY, tmp_path))["memory"].state == "ok"
    used = by_name(find_host_facts(config, forecast, HostMemory(64 * GIB, 1), tmp_path))["memory"]
    assert used.state == "warning" and "the run needs about" in used.found
    assert by_name(find_host_facts(config, forecast, HostMemory(1, 1), tmp_path))["memory"].state == "fault"
    assert str(tmp_path) in by_name(find_host_facts(config, forecast, PLENTY, tmp_path))["disk"].found


@pytest.mark.parametrize(
    ("offset_s", "state"), [(0, "ok"), (5, "warning"), (-6, "warning"), (600, "fault"), (-86_400, "fault")]
)
def test_a_clock_is_told_by_the_date_of_an_answer(offset_s: float, state: str) -> None:
    with server(formatdate(time() + offset_s, usegmt=True)) as url:
        (finding,) = find_clock_facts([url])
    assert finding.state == state
    if offset_s:
        assert ("ahead of" if offset_s > 0 else "behind") in finding.found and "chronyc" in (finding.remedy or "")


@pytest.mark.parametrize("date", [None, "yesterday", ""])
def test_a_server_without_a_date_tells_no_clock(date: str | None) -> None:
    with server(date) as url:
        (finding,) = find_clock_facts([url])
    assert finding.state == "note"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "ftp://127.0.0.1", "http://127.0.0.1:99999"])
def test_a_server_that_does_not_answer_is_a_warning(url: str) -> None:
    (finding,) = find_clock_facts([url])
    assert finding.state == "warning"


def test_a_password_in_a_url_is_not_shown() -> None:
    assert "hidden" not in str(list(find_clock_facts(["http://me:hidden@127.0.0.1:1"])))


def test_the_servers_of_a_run_are_its_instances_and_its_endpoint(tmp_path: Path) -> None:
    config = config_of(run={"dir": str(tmp_path)}, pool={"instances": ["http://a:1/"]})
    assert servers_of(config, ["b:2"]) == ["http://b:2", "http://a:1"]
    (tmp_path / "fleet.json").write_text('{"url": "http://c:3"}')
    assert servers_of(config, []) == ["http://a:1", "http://c:3"]
    (tmp_path / "fleet.json").write_text("{")
    assert servers_of(config, []) == ["http://a:1"]


def test_devices_are_listed_and_missing_ones_a_fault(tmp_path: Path) -> None:
    def run(command: list[str]) -> str:
        return {"--list-gpus": "GPU 0: X\n"}.get(command[1], "0, X, 550.1, 80000 MiB, 1 MiB\n")

    config = config_of(trainer={"device": "cuda"})
    found = by_name(find_device_facts(config, {"CUDA_VISIBLE_DEVICES": "0"}, run, tmp_path))
    assert "550.1" in found["gpu 0"].found
    assert found["devices"].state == "fault" and "1 cuda devices usable, 2 needed here" in found["devices"].found
    assert "set run.placement to 'shared' or 'turns'" in (found["devices"].remedy or "")
    twice = by_name(find_device_facts(config, {"CUDA_VISIBLE_DEVICES": "0,0"}, run, tmp_path))
    assert twice["devices"].state == "fault"
    on_cpu = by_name(find_device_facts(None, {}, lambda _: "", tmp_path))
    assert on_cpu["devices"].state == "note"


@pytest.mark.parametrize(
    ("placement", "ranks", "instances", "present", "needed", "remedy"),
    [
        ("turns", 1, 1, 1, 1, ""),
        ("shared", 2, 1, 2, 2, ""),
        ("turns", 1, 2, 1, 2, "let CUDA_VISIBLE_DEVICES name more"),
        ("separate", 2, 1, 2, 3, "set run.placement to 'shared' or 'turns', for both pools on one device"),
        ("separate", 2, 1, 1, 3, "let CUDA_VISIBLE_DEVICES name more"),
    ],
)
def test_pools_on_the_same_devices_need_those_of_the_larger_one(
    placement: str, ranks: int, instances: int, present: int, needed: int, remedy: str, tmp_path: Path
) -> None:
    config = config_of(
        trainer={"device": "cuda", "num_processes": ranks},
        inference={"num_instances": instances},
        run={"dir": str(tmp_path), "placement": placement},
        publish={"transport": "snapshot", "snapshot_dir": str(tmp_path)},
    )
    listed = "".join(f"GPU {i}: X\n" for i in range(present))
    found = by_name(find_device_facts(config, {}, lambda command: listed * ("--list-gpus" in command), tmp_path))
    devices = found["devices"]
    assert devices.found == f"{present} cuda devices usable, {needed} needed here"
    assert devices.state == ("fault" if remedy else "ok") and (devices.remedy or "").startswith(remedy)


@pytest.mark.parametrize(("driver", "cuda", "is_named"), DRIVERS)
def test_a_driver_too_old_for_torch_is_a_warning(
    driver: str, cuda: str | None, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cuda_of_torch", lambda: cuda)
    found = by_name(find_device_facts(None, {}, lambda _: f"0, X, {driver}, 80000 MiB, 1 MiB\n", tmp_path))
    assert ("driver" in found) == is_named
    if is_named:
        finding = found["driver"]
        assert finding.state == "warning" and driver in finding.found and f"CUDA {cuda}" in finding.found
        assert finding.remedy is not None and "cu126" in finding.remedy


@pytest.mark.parametrize(
    ("npu", "torch", "is_named"),
    [
        ("2.7.1.post4", "2.7.1", False),
        ("2.7.1.post4", "2.7.1+cpu", False),
        ("2.7.1+git5c1f6a8", "2.7.1+cpu", False),
        ("2.10.0.post2", "2.7.1", True),
        (None, "2.7.1", False),
    ],
)
def test_a_torch_npu_of_another_torch_is_a_fault(
    npu: str | None, torch: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build, "installed", {"torch-npu": npu, "torch": torch}.get)
    monkeypatch.setattr(devices, "installed", torch_build.installed)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = by_name(find_device_facts(None, {}, lambda _: "", tmp_path))
    assert ("torch build" in found) == is_named
    if is_named:
        finding = found["torch build"]
        assert finding.state == "fault" and finding.remedy == "pip install torch-npu==2.7.1"
        assert finding.found == "torch 2.7.1 and torch_npu 2.10.0.post2 are no pair"
        for device, state in (("npu", "fault"), ("cpu", "note")):
            config = config_of(trainer={"device": device})
            assert by_name(find_device_facts(config, {}, lambda _: "", tmp_path))["torch build"].state == state


def test_a_line_of_the_tool_that_names_no_gpu_is_none(tmp_path: Path) -> None:
    said = "Unable to determine the device handle for GPU 0000:00:1E.0: Unknown Error\n"
    assert "devices" in by_name(find_device_facts(None, {}, lambda _: said, tmp_path))


@pytest.mark.parametrize(
    ("line", "cuda"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: Optional[str] = None", None)]
)
def test_the_cuda_of_torch_is_read_from_its_file(
    line: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info/METADATA").write_text("Name: torch\nVersion: 9.9\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"__all__ = ['cuda']\n__version__ = '9.9'\n{line}\nhip = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch_build.cuda_of_torch() == cuda


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("theirs", "own", "transport", "state"),
    [
        ("2.30.7", "2.29.7", "broadcast", "fault"),
        ("2.29.7", "2.29.7", "broadcast", "ok"),
        ("2.30.7", "2.29.7", "snapshot", "ok"),
        ("2.30.7", None, "broadcast", "ok"),
    ],
)
def test_an_engine_with_another_nccl_than_the_trainers_is_a_fault_before_anything_starts(
    theirs: str, own: str | None, transport: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho this Python serves with vLLM 0.33\necho with NCCL {theirs}\n")
    python.chmod(0o755)
    monkeypatch.setattr(start_checks, "nccl_package", lambda: own)
    config = config_of(
        inference={"engine": "vllm", "python": str(python)},
        trainer={"device": "cuda"},
        publish={"transport": transport, "snapshot_dir": str(tmp_path)},
    )
    found = by_name(find_versions(config))["engine"]
    assert found.state == state
    if state == "fault":
        assert f"{python}', which has NCCL 2.30.7, and the trainer's {sys.executable} has 2.29.7" in found.found
        assert "torch 2.13.0 with vLLM 0.32.0" in found.found


def test_an_engine_that_is_missing_is_a_fault_with_how_to_get_it() -> None:
    config = config_of(inference={"engine": "vllm", "python": "/no/such/python"})
    found = by_name(find_versions(config))["engine"]
    assert found.state == "fault" and "/no/such/python" in found.found and found.remedy


def test_several_hosts_need_a_network_and_their_port() -> None:
    names = set(by_name(find_network_facts(config_of(cluster={"training_nodes": 2}))))
    assert {"network", "host name", "port 29500"} <= names
    assert not any(name.startswith("port") for name in by_name(find_network_facts(config_of())))


def test_overrides_without_a_config_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--train.iterations", "3"])
    assert end.value.code == 2 and "name the config first" in capsys.readouterr().err
    assert main([os.devnull + "/none.toml"]) == 2


def test_names_of_servers_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show([Finding("clock of h/[/x][bold]", "warning", "does not answer")])
    assert "clock of h/[/x][bold]" in capsys.readouterr().out


def test_a_run_dir_that_cannot_be_looked_at_is_no_reason_to_fail() -> None:
    findings = by_name(find_host_facts(config_of(run={"dir": "n" * 300}), None, PLENTY))
    assert findings["disk"].state in ("ok", "warning")


def test_the_packages_of_trackers_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "trackio", ("no_such_module",))
    findings = by_name(find_versions(config_of(tracking={"trackers": ["trackio"]})))
    assert findings["extra trackio"].state == "fault" and "no_such_module" in findings["extra trackio"].found
