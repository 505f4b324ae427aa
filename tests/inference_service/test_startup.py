"""Starting and stopping a server: bad input ends in one line and code 2, a signal in code 0."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed


def assert_ends_with_one_line(process: subprocess.Popen[str], *words: str) -> None:
    output, _ = process.communicate(timeout=240)
    lines = [line for line in output.splitlines() if line.startswith("inference_service:")]
    assert process.returncode == 2 and len(lines) == 1 and "Traceback" not in output, output
    assert all(word in lines[0] for word in words), output


def test_port_in_use_ends_with_code_2(start_process: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start_process("--model", str(tiny_model("qwen3")), "--port", port)
        assert_ends_with_one_line(process, f"127.0.0.1:{port}", "--port")


def test_missing_model_ends_with_code_2(start_process: Callable[..., Any], tmp_path: Path) -> None:
    assert_ends_with_one_line(start_process("--model", str(tmp_path / "none"), "--port", "0"), str(tmp_path / "none"))


def test_damaged_model_ends_with_code_2(start_process: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert_ends_with_one_line(start_process("--model", str(tmp_path), "--port", "0"), str(tmp_path))


def test_length_beyond_the_model_ends_with_code_2(
    start_process: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    process = start_process("--model", str(tiny_model("qwen3")), "--port", "0", "--max-model-len", "999")
    assert_ends_with_one_line(process, "999", "256")


def test_bad_flags_end_before_torch_is_imported(
    start_process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    process = start_process("--model", "x", "--max-concurrency", "0")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2 and "--max-concurrency" in output
    imported = {line.rpartition("|")[2].strip() for line in output.splitlines() if line.startswith("import time:")}
    assert "inference_service" in imported and "torch" not in imported


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_ends_a_busy_server_with_code_0(
    start_process: Callable[..., Any],
    ready: Callable[..., Any],
    tiny_model: Callable[..., Path],
    number: signal.Signals,
) -> None:
    instance = ready(start_process("--model", str(tiny_model("qwen3")), "--port", "0"))
    instance.client.post("/pause")
    body = {"token_ids": [5, 6], "sampling_params": {}}
    with instance.client.stream("GET", "/health"), socket.create_connection(instance.url[7:].split(":")) as waiting:
        content = str(body).replace("'", '"').encode()
        head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        waiting.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        while instance.metric("vllm:num_requests_waiting") < 1:
            assert instance.process.poll() is None, "the server ended before it was told to"
        instance.process.send_signal(number)
        # It neither waits for the request nor for the open connection, which would last for ever.
        assert instance.process.wait(timeout=240) == 0


def test_signal_while_loading_ends_with_code_0(
    start_process: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    process = start_process("--model", str(tiny_model("qwen3")), "--port", "0")
    while not catches(process.pid, signal.SIGTERM):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 0


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has set a handler for this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_token_guards_every_route_but_health_and_metrics(
    launch_instance: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    guarded = launch_instance(
        tiny_model("qwen3"), env={"ASYNC_RL_TOKEN": "s3cret"}, headers={"Authorization": "Bearer s3cret"}
    )
    assert guarded.client.get("/version").status_code == 200
    guarded.generate([5, 6], max_tokens=1)
    for header in ("Bearer wrong", "s3cret", "", "Bearer sécret"):
        for method, path in (("GET", "/version"), ("POST", "/pause"), ("POST", "/inference/v1/generate")):
            answer = guarded.client.request(method, path, headers={"Authorization": header.encode()})
            assert answer.status_code == 401 and "bearer" in answer.json()["error"]["message"]
    for path in ("/health", "/ping", "/metrics"):
        assert guarded.client.get(path, headers={"Authorization": ""}).status_code == 200
    assert guarded.client.get("/is_paused").json() == {"is_paused": False}
