"""vLLM behind `python -m inference_service --engine vllm`: weight updates, and its end.

The last but one kills the server that all tests of this folder share, so only the last one, with another, may follow.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.snapshot import SnapshotWriter
from tests.support.running_instance import Instance, TrainerSide

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8, 9]
MAX_GAP = 1e-4


def reference(model: torch.nn.Module, response: list[int]) -> list[float]:
    """transformers' log-prob of every response token."""
    ids = torch.tensor([[*PROMPT, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(PROMPT) :, None]).squeeze(-1).tolist()


def assert_serves(vllm: Instance, model: torch.nn.Module, version: str) -> None:
    """The server samples from exactly these weights, under that version."""
    choice = vllm.generate(PROMPT, max_tokens=12, ignore_eos=True, seed=3)["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(reference(model, choice["token_ids"]), abs=MAX_GAP)
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 12}]


def worker_answer(vllm: Instance, method: str, *args: str) -> Any:
    return vllm.post("/collective_rpc", {"method": method, "args": list(args)})["results"]


def other_weights(path: Path, seed: int) -> torch.nn.Module:
    """The same architecture with other weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_weight_update_arrives_whole_and_is_what_is_served(vllm: Instance, vllm_model: Path) -> None:
    for seed in (1, 2):
        model = other_weights(vllm_model, seed)
        sent = TrainerSide([vllm]).publish(model, f"step-{seed}")
        assert worker_answer(vllm, "weight_fingerprint") == [sent]
        assert vllm.client.get("/weight_info").json() == {"weight_version": f"step-{seed}"}
        assert_serves(vllm, model, f"step-{seed}")


def test_a_weight_snapshot_is_loaded_without_a_group(vllm: Instance, vllm_model: Path, tmp_path: Path) -> None:
    model = other_weights(vllm_model, 3)
    stream = TrainerSide.stream(model)
    writer = SnapshotWriter(tmp_path / "w.safetensors", [spec for spec, _ in stream])
    written = writer.write(iter(stream))
    path = writer.commit()
    update = TrainerSide.update_info(stream)
    update["update_info"]["snapshot"] = str(path)
    proof = {
        "path": "/collective_rpc",
        "body": json.dumps({"method": "weight_fingerprint", "args": []}),
        "expected": {"results": written},
    }
    calls = [
        {"path": "/is_sleeping", "method": "GET", "expected": {"is_sleeping": False}},
        {"path": "/pause?mode=keep"},
        {"path": "/start_weight_update", "body": "{}"},
        {"path": "/start_weight_update", "body": "{}", "may_be_refused": True},
        {"path": "/update_weights", "body": json.dumps(update)},
        proof,
        {"path": "/finish_weight_update", "body": json.dumps({"weight_version": "snap"})},
        {"path": "/resume"},
        {**proof, "expected": {"results": "another"}},
        {"path": "/pause?mode=keep"},
    ]
    answers = vllm.post("/async_rl/sequence", {"calls": calls})["answers"]
    # The second start is refused, as where an update was left open; the last call but one is not as expected.
    assert [answer["status"] for answer in answers] == [200, 200, 200, 500, *[200] * 5]
    assert "already active" in answers[3]["body"]
    assert_serves(vllm, model, "snap")


def test_a_whole_update_mends_what_a_broken_one_left(vllm: Instance, vllm_model: Path) -> None:
    model = other_weights(vllm_model, 4)
    stream = TrainerSide.stream(model)
    strange = [*stream[:5], (TensorSpec("model.no_such.weight", "float32", (2,)), torch.zeros(2))]
    vllm.client.post("/pause", params={"mode": "keep"})
    vllm.post("/start_weight_update")
    side = TrainerSide([vllm])
    (call,) = side.call_update(strange, status=500)
    side.group.send(iter(strange), 20_000)
    assert "no_such" in call.result()["error"]["message"]
    assert vllm.client.get("/health").status_code == 200
    TrainerSide([vllm]).publish(model, "mended")
    assert_serves(vllm, model, "mended")


@pytest.mark.parametrize("end", ["trainer dies", "lists contradict each other"])
def test_an_update_that_cannot_come_is_a_named_error_and_the_next_one_works(
    vllm: Instance, vllm_model: Path, end: str
) -> None:
    model = other_weights(vllm_model, 5)
    stream = TrainerSide.stream(model)
    vllm.client.post("/pause", params={"mode": "keep"})
    vllm.post("/start_weight_update")
    side = TrainerSide([vllm])
    if end == "trainer dies":
        (call,) = side.call_update(stream, status=500)
        side.die()
        message = call.result()["error"]["message"]
        assert "weight broadcast broke" in message
    else:
        update = TrainerSide.update_info(stream)
        update["update_info"]["shapes"].pop()
        assert "equal lengths" in vllm.post("/update_weights", update, status=500)["error"]["message"]
    TrainerSide([vllm]).publish(model, end)
    assert_serves(vllm, model, end)


def test_workers_note_a_version_for_servers_that_keep_none(vllm: Instance) -> None:
    worker_answer(vllm, "note_weight_version", "run-1.step-4")
    assert worker_answer(vllm, "noted_weight_version") == ["run-1.step-4"]


def test_a_killed_supervisor_leaves_no_vllm_behind(vllm: Instance) -> None:
    family = psutil.Process(vllm.process.pid).children(recursive=True)
    assert len(family) >= 2, "the API server and its engine"
    vllm.process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [p.cmdline() for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_an_engine_that_dies_during_an_update_ends_its_instance_and_nothing_is_left(
    start_vllm: Callable[[], AbstractContextManager[Instance]], vllm_model: Path, vllm_tmpdir: Path
) -> None:
    abandoned = list(vllm_tmpdir.iterdir())
    segments = set(Path("/dev/shm").iterdir())
    with start_vllm() as instance:
        (own,) = vllm_tmpdir.iterdir()
        assert own not in abandoned, "what the killed one left is removed"
        assert list(own.iterdir())
        instance.client.post("/pause", params={"mode": "keep"})
        instance.post("/start_weight_update")
        # A request that the engine will never answer, as a publish under way.
        TrainerSide([instance]).call_update(TrainerSide.stream(other_weights(vllm_model, 6)))
        family = psutil.Process(instance.process.pid).children(recursive=True)
        (engine,) = (process for process in family if "EngineCore" in process.name())
        killed_s = time.monotonic()
        engine.kill()
        assert instance.process.wait(60) == 1
        # By itself vLLM's server was seen to hang for 150 s.
        assert time.monotonic() - killed_s < 30
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert list(vllm_tmpdir.iterdir()) == []
    assert set(Path("/dev/shm").iterdir()) <= segments
