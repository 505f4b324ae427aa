"""The vLLM servers of all these tests, run by the Python of .venv-vllm on a model that its kernels take.

The files are in the order in which the server `vllm` can pass them: it is fresh for the first two, of which
the first only has it refuse adapters, and gone after the last.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from async_rl.config.trainer_section import TrainerSection
from async_rl.shared.net.free_ports import free_ports
from benchmarks.common.running_instance import launch
from inference_service.vllm.command import SERVER_MODULE
from tests.support import ROOT
from tests.support.running_instance import Instance, wait_until_ready
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_TIMEOUT_S = 600.0
"""Twenty seconds on a quiet machine; more than four minutes were seen on a busy one."""
TOKEN = "s3cret"
StartVllm = Callable[..., AbstractContextManager[Instance]]
NO_REUSE = httpx.Limits(max_keepalive_connections=0)
"""vLLM closes a connection after an answer of 500 without saying so in its headers."""


@pytest.fixture(scope="session")
def vllm_python() -> str:
    assert PYTHON.exists(), f"{PYTHON} is missing: `make test-vllm` makes it"
    return str(PYTHON)


@pytest.fixture(scope="session")
def vllm_model(tiny_model: Callable[..., Path]) -> Path:
    """vLLM's attention on CPU has no heads smaller than 32."""
    return tiny_model("qwen3", tied=True, head_dim=32)


@pytest.fixture(scope="session")
def vllm_tmpdir() -> Iterator[Path]:
    """TMPDIR of the servers: short enough for the sockets below it."""
    with tempfile.TemporaryDirectory(prefix="vllm-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def start_vllm(vllm_python: str, vllm_model: Path, vllm_tmpdir: Path) -> StartVllm:
    """Starts a server that asks for TOKEN, which `client` sends."""
    return partial(running_vllm, vllm_python, vllm_model, vllm_tmpdir)


@pytest.fixture(scope="session")
def vllm(start_vllm: StartVllm) -> Iterator[Instance]:
    """The server that these tests share."""
    with start_vllm() as instance:
        yield instance


@pytest.fixture(scope="session")
def other_vllm(vllm_python: str, vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """A server that somebody started by vLLM's own program, with the mending of tied heads taken out of the plugin.

    So it is what vLLM 0.32 on CPU is by itself: it answers without async-rl's headers, asks for no token, and a reload
    leaves its head as it was.
    """
    directory = tmp_path_factory.mktemp("no_mending")
    (directory / "no_mending.py").write_text(NO_MENDING)
    distribution = directory / "no_mending-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: no-mending\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[vllm.general_plugins]\nno_mending = no_mending:register\n")
    port = free_ports(1)[0]
    log = directory / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [vllm_python, "-m", SERVER_MODULE, "--model", str(vllm_model), "--port", str(port), *BY_HAND],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **BY_HAND_ENVIRONMENT, "PYTHONPATH": str(directory)},
            text=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, log)
        with httpx.Client(base_url=url, timeout=60, limits=NO_REUSE) as client:
            yield Instance(url, process, client)
    finally:
        end(process)


NO_MENDING = """
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from benchmarks.common.running_instance import launch
from inference_service.vllm.command import BACKEND
from inference_service.vllm import plugin as vllm_plugin


def register():
    vllm_plugin.register()
    load = WeightTransferEngineFactory._registry[BACKEND]

    def load_without_mending():
        engine = load()
        from inference_service.vllm import weight_engine as vllm_engine

        vllm_engine.pack_tied_heads = lambda model: None
        return engine

    WeightTransferEngineFactory._registry[BACKEND] = load_without_mending
"""


BY_HAND = (
    *("--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", "--max-num-seqs", "8"),
    *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out", "--enforce-eager"),
    *("--weight-transfer-config", '{"backend": "async_rl"}'),
    *("--worker-extension-cls", "inference_service.vllm.worker.WorkerExtension"),
)
BY_HAND_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What docs/vllm.md says that a server needs, as far as it concerns the CPU."""


@contextmanager
def running_vllm(python: str, model: Path, tmpdir: Path, *engine_options: str) -> Iterator[Instance]:
    process = launch(
        *("--engine", "vllm", "--model", str(model), "--port", "0", "--served-model-name", "tiny"),
        *("--max-concurrency", "8"),
        *(("--", *engine_options) if engine_options else ()),
        env={"ASYNC_RL_TOKEN": TOKEN, "TMPDIR": str(tmpdir)},
        python=python,
    )
    try:
        url = wait_until_ready(process, timeout_s=START_TIMEOUT_S).url
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, timeout=60, headers=headers, limits=NO_REUSE) as client:
            yield Instance(url, process, client)
    finally:
        end(process)


def wait_until_healthy(url: str, process: "subprocess.Popen[str]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"vLLM ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"not healthy after {START_TIMEOUT_S:g} s:\n{log.read_text()}"
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.25)


def end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    yield parallel
    parallel.close()
