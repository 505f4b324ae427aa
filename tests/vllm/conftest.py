"""One vLLM server for all these tests, run by the Python of .venv-vllm on a model that its kernels take."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from running_instance import Instance, launch, wait_until_ready

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
START_TIMEOUT_S = 240.0
TOKEN = "s3cret"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    assert PYTHON.exists(), f"{PYTHON} is missing: `make test-vllm` makes it"
    return str(PYTHON)


@pytest.fixture(scope="session")
def vllm_model(tiny_model: Callable[..., Path]) -> Path:
    """vLLM's attention on CPU has no heads smaller than 32."""
    return tiny_model("qwen3", tied=True, head_dim=32)


@pytest.fixture(scope="session")
def vllm(vllm_python: str, vllm_model: Path) -> Iterator[Instance]:
    """The server; it asks for TOKEN, which `client` sends."""
    process = launch(
        *("--engine", "vllm", "--model", str(vllm_model), "--port", "0", "--served-model-name", "tiny"),
        *("--logprobs-mode", "processed_logprobs", "--max-concurrency", "8"),
        env={"ASYNC_RL_TOKEN": TOKEN},
        python=vllm_python,
    )
    url = wait_until_ready(process, timeout_s=START_TIMEOUT_S).url
    # vLLM closes a connection after an answer of 500 without saying so in its headers.
    no_reuse = httpx.Limits(max_keepalive_connections=0)
    client = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {TOKEN}"}, limits=no_reuse)
    instance = Instance(url, process, client)
    yield instance
    instance.client.close()
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
