"""A real OpenEnv server, in an environment of its own (`make test-agents`), as the environment of a whole run."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from async_rl.shared.net.free_ports import free_ports
from tests.support import ROOT

pytestmark = [pytest.mark.agents, pytest.mark.distributed]

PYTHON = os.environ.get("ASYNC_RL_AGENTS_PYTHON", str(ROOT / ".venv-agents/bin/python"))
EXAMPLES = ROOT / "examples"
START_S = 60.0


@pytest.fixture
def server() -> Iterator[str]:
    (port,) = free_ports(1)
    command = [PYTHON, "-m", "uvicorn", "server:app", "--port", str(port)]
    process = subprocess.Popen(command, cwd=EXAMPLES / "openenv", stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health"):
                break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
            time.sleep(0.2)
    yield f"ws://127.0.0.1:{port}/ws"
    process.kill()
    process.wait()


def test_a_run_is_trained_on_episodes_of_the_server(server: str, tmp_path: Path) -> None:
    folder = tmp_path / "openenv"
    shutil.copytree(EXAMPLES / "openenv", folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENENV_URL": server}
    for command in (
        [str(EXAMPLES / "guess_the_number" / "make_model.py"), "model"],
        ["-m", "deploy.local.run", "run.toml", "--train.iterations", "3"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs" / "openenv" / "ledger.jsonl").read_text().splitlines()
    proofs = [json.loads(line) for line in lines]
    assert [proof["on_policy"] for proof in proofs] == [True] * 3
    assert all(14 * 16 < proof["num_turns"] <= 3 * 14 * 16 and proof["num_branches"] == 0 for proof in proofs)
