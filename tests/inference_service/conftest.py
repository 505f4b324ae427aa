"""Real inference instances in processes of their own, and a trainer's end of the weight group in the test process."""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.running_instance import launch
from tests.support.running_instance import Instance, TrainerSide, wait_until_ready


@pytest.fixture(scope="session")
def launch_instance() -> Iterator[Callable[..., Instance]]:
    """`launch_instance(model, "--max-concurrency", "8")` -> a ready Instance at a free port; ended with the session."""
    running: list[Instance] = []

    def start(
        model: Path, *arguments: str, env: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Instance:
        name = ("--served-model-name", "tiny")
        instance = wait_until_ready(
            launch("--model", str(model), "--port", "0", *name, *arguments, env=env), headers=headers
        )
        running.append(instance)
        return instance

    yield start
    for instance in running:
        instance.client.close()
        instance.process.terminate()
    for instance in running:
        instance.process.wait(timeout=240)


@pytest.fixture(scope="session")
def start_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_process("--model", ...)` -> the bare process, for starts that fail or signals."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        processes.append(launch(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="session")
def ready() -> Callable[..., Instance]:
    return wait_until_ready


@pytest.fixture(scope="session")
def instance(launch_instance: Callable[..., Instance], tiny_model: Callable[..., Path]) -> Instance:
    """A shared Qwen3 under default settings; tests leave it running, unpaused, and with its weights."""
    return launch_instance(tiny_model("qwen3"))


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[float]]:
    """`reference(model, prompt, response, temperature)` -> transformers' own log-prob of every response token."""

    def logprobs(
        model: torch.nn.Module, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).tolist()

    return logprobs


@pytest.fixture(scope="session")
def load_reference() -> Callable[[Path], torch.nn.Module]:
    return lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="session")
def trainer_side() -> type[TrainerSide]:
    return TrainerSide
