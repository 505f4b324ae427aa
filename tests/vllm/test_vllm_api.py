"""What a trainer's client finds at a vLLM server: the wire, and which process answers; the first file, so it is fresh.

The last part is about a vLLM that somebody starts without `async-rl serve`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from async_rl.errors import InstanceRestarted
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.inference import SamplingParams
from async_rl.shared.protocol.routes import BOOT_ID_HEADER, MAX_CONCURRENCY_HEADER
from tests.support import ROOT
from tests.support.running_instance import Instance

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8, 9]
GENERATE = "/inference/v1/generate"

Connect = Callable[[Instance], InstanceClient]


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture
def connect(loop: EventLoopThread) -> Iterator[Connect]:
    """`connect(instance)`: a trainer's client that has asked the server what it is."""
    connections = Connections("s3cret")

    def connect(instance: Instance) -> InstanceClient:
        client = InstanceClient(connections, instance.url, request_timeout_s=60.0)
        loop.run(client.learn_dialect())
        return client

    yield connect
    loop.run(connections.close())


class GivenUp(Exception):
    """A trainer has no more use for an answer."""


async def broken_off(client: InstanceClient, version: str, boot_id: str | None) -> PartialRollout:
    """A long response, given up once some of its tokens have come."""
    partial = PartialRollout(0)
    sampling = SamplingParams(max_tokens=240, temperature=1.0, ignore_eos=True, logprobs=0)

    def give_up(num_tokens: int, num_ended: int) -> None:
        if num_tokens >= 4:
            raise GivenUp

    with pytest.raises(GivenUp):
        await client.generate(PROMPT, sampling, "broken-off", version, [partial], boot_id=boot_id, on_progress=give_up)
    return partial


def test_vllm_passes_the_contract_that_the_embedded_engine_passes(vllm: Instance) -> None:
    env = {**os.environ, "ASYNC_RL_CONTRACT_URL": vllm.url, "ASYNC_RL_TOKEN": "s3cret"}
    contract = ROOT / "tests" / "inference_service" / "api" / "test_contract.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(contract), "-p", "no:cacheprovider", "--tb=short", "-rs"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert "skipped" not in run.stdout, run.stdout


def test_a_fresh_worker_has_received_nothing(vllm: Instance) -> None:
    for method, expected in (("weight_fingerprint", None), ("noted_weight_version", "default")):
        assert vllm.post("/collective_rpc", {"method": method, "args": []})["results"] == [expected]


def test_every_route_but_health_and_metrics_asks_for_the_token(vllm: Instance) -> None:
    with httpx.Client(base_url=vllm.url) as stranger:
        for method, path in (("POST", "/pause"), ("POST", "/collective_rpc"), ("GET", "/v1/models"), ("GET", "/docs")):
            assert stranger.request(method, path).status_code == 401, path
        for path in ("/health", "/ping", "/metrics"):
            assert stranger.get(path).status_code == 200, path
    assert vllm.client.get("/is_paused").json() == {"is_paused": False}


def test_refusals_by_the_guard_name_the_process_too(vllm: Instance) -> None:
    refused = httpx.get(f"{vllm.url}/v1/models")
    assert refused.status_code == 401
    served = vllm.client.get("/v1/models")
    for name in (BOOT_ID_HEADER, MAX_CONCURRENCY_HEADER):
        assert refused.headers[name] == served.headers[name]


def test_a_streamed_answer_is_the_whole_answer_in_parts(vllm: Instance) -> None:
    params = {"max_tokens": 9, "n": 2, "logprobs": 0, "seed": 7, "ignore_eos": True, "stream_interval": 4}
    whole = vllm.generate(PROMPT, **params)["choices"]
    body = {"model": "tiny", "token_ids": PROMPT, "stream": True, "sampling_params": params}
    with vllm.client.stream("POST", GENERATE, json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    parts = [choice for event in events for choice in json.loads(event)["choices"]]
    for choice in whole:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert len(mine) > 2
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["weight_versions"] == choice["weight_versions"]


def test_a_trainer_learns_the_process_and_the_concurrency_and_trusts_no_other_process(
    vllm: Instance, connect: Connect, loop: EventLoopThread
) -> None:
    client = connect(vllm)
    assert (client.dialect.name, client.max_concurrency) == ("vllm", 8), "what --max-concurrency said"
    boot_id = loop.run(client.health())
    held = loop.run(client.holding())
    assert boot_id is not None and held.boot_id == boot_id and held.version == "default"
    with pytest.raises(InstanceRestarted, match="'the-one-before' was put in service"):
        loop.run(broken_off(client, held.version, "the-one-before"))


def test_tokens_of_an_answer_that_broke_off_stay_if_they_are_of_the_version_in_service(
    vllm: Instance, connect: Connect, loop: EventLoopThread
) -> None:
    client = connect(vllm)
    held = loop.run(client.holding())
    kept = loop.run(broken_off(client, held.version, held.boot_id))
    assert 4 <= len(kept.token_ids) == len(kept.logprobs) < 240
    assert [(span.version, span.start, span.end) for span in kept.spans] == [("default", 0, len(kept.token_ids))]
    lost = loop.run(broken_off(client, "another-version", held.boot_id))
    assert not lost.token_ids and not lost.spans


def test_a_vllm_that_others_started_is_known_by_its_start_time(
    other_vllm: Instance, connect: Connect, loop: EventLoopThread
) -> None:
    client = connect(other_vllm)
    assert client.max_concurrency is None and loop.run(client.health()) is None
    held = loop.run(client.holding())
    assert held.boot_id is not None and held.boot_id.startswith("started-")
    # Hundredths of a second since a boot whose time psutil and prometheus_client each read for themselves.
    started_s = psutil.Process(other_vllm.process.pid).create_time()
    assert float(held.boot_id.removeprefix("started-")) == pytest.approx(started_s, abs=1.5)
    assert loop.run(client.holding()) == held, "it stays the same"
    kept = loop.run(broken_off(client, held.version, held.boot_id))
    assert len(kept.token_ids) >= 4
    lost = loop.run(broken_off(client, held.version, "started-1.0"))
    assert not lost.token_ids, "another process may have made them"
