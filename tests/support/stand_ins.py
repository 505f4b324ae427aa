"""A folder in which `python -m deploy.local.run` finds stand-ins for the inference service and the trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.published_models import CONFIGS, WEIGHTS
from tests.support.waiting import wait_for

CONFIG = """
[run]
dir = "run"
[model]
path = "model"
[prompts]
source = "rows.jsonl"
prompts_per_batch = 1
max_prompt_tokens = 100
chat_template = false
[rollout]
max_response_tokens = 28
[reward]
name = "math"
[train]
iterations = 3
[inference]
num_instances = 2
"""

COMMON = """
import json, os, pathlib, signal, subprocess, sys, time

def leave_pid(name):
    pathlib.Path("pids").mkdir(exist_ok=True)
    pathlib.Path("pids", f"{name}.{os.getpid()}").touch()

def start_worker():
    # In a session of its own, as torchrun's workers and process pools are.
    code = "import os, pathlib, time; pathlib.Path('pids', f'worker.{os.getpid()}').touch(); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""

INSTANCE = (
    COMMON
    + """
import http.server
port = int(sys.argv[sys.argv.index("--port") + 1])
leave_pid(f"instance-{port}")
start_worker()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
)

METRICS = {
    "iterations": 3,
    "desired_instances": 1,
    "seconds": 2.0,
    "wait_s": 0.4,
    "train_s": 1.2,
    "rollout_s": 1.5,
    "publish_s": 0.1,
    "step_s": 0.1,
    "reward_mean": 0.5,
    "accuracy": 0.25,
    "response_tokens_mean": 8.0,
    "prompt_tokens": 100,
    "response_tokens": 900,
    "tokens_per_s": 500.0,
    "num_instances": 2,
    "num_groups": 4,
}

TRAINER = (
    "from async_rl.shared.programs.start_gate import wait_at_gate"
    + COMMON
    + f"METRICS = {METRICS!r}\n"
    + """
leave_pid("trainer")
start_worker()
wait_at_gate(os.environ)
print("trainer starts with", *sys.argv[1:], flush=True)
for iteration in range(3):
    with open("run/metrics.jsonl", "a") as file:
        file.write(json.dumps({**METRICS, "iteration": iteration}) + chr(10))
"""
)


class Ground:
    """A folder with stand-ins, and `deploy.local.run` runs in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "config.toml").write_text(CONFIG)
        (path / "rows.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n')
        (path / "model").mkdir()
        model = {**CONFIGS["Qwen/Qwen3-0.6B"], "max_position_embeddings": 128}
        (path / "model" / "config.json").write_text(json.dumps(model))
        (path / "model" / "tokenizer_config.json").write_text("{}")
        (path / "model" / "model.safetensors").write_bytes(WEIGHTS)
        (path / "inference_service.py").write_text(INSTANCE)
        (path / "trainer.py").write_text(TRAINER)

    def then_trainer_does(self, code: str) -> None:
        """Adds what the trainer does after its three iterations."""
        with (self.path / "trainer.py").open("a") as file:
            file.write(code + "\n")

    def before_instances_serve(self, code: str) -> None:
        """Adds what the instances do before they can be reached."""
        (self.path / "inference_service.py").write_text(INSTANCE.replace("\nclass Handler", f"\n{code}\nclass Handler"))

    def before_trainer_waits(self, code: str) -> None:
        """Adds what the trainer does while it loads."""
        (self.path / "trainer.py").write_text(TRAINER.replace("\nwait_at_gate", f"\n{code}\nwait_at_gate"))

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.local.run", "config.toml", *overrides],
            cwd=self.path,
            # What the working directory holds is not run in place of the installed programs.
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self.path), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def pids(self) -> dict[str, int]:
        """Process ids by the names the stand-ins gave; workers have their id in the name."""
        found = [path.name.rpartition(".") for path in (self.path / "pids").glob("*")]
        return {f"{name}-{pid}" if name == "worker" else name: int(pid) for name, _, pid in found}

    def wait_for_processes(self, count: int) -> dict[str, int]:
        wait_for(lambda: len(self.pids()) >= count, said=self.pids)
        return self.pids()

    def wait_for_iterations(self) -> dict[str, int]:
        """Waits until the trainer has passed its gate and trained."""
        wait_for((self.path / "run" / "metrics.jsonl").exists, said=self.pids)
        return self.pids()

    def living(self) -> dict[str, int]:
        """What still runs, after a little while for the guards to finish."""
        deadline = time.monotonic() + 20
        while (
            alive := {name: pid for name, pid in self.pids().items() if _lives(pid)}
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive

    def kill_left(self) -> None:
        for pid in self.pids().values():
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] in "ZX")
