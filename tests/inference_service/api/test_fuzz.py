"""Ten thousand bad requests leave an instance as it was: every answer is 4xx, and nothing was generated or changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fuzzing import fuzz

pytestmark = pytest.mark.distributed

TOKEN = "s3cret"
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})


@pytest.fixture(scope="module")
def guarded(launch_instance: Callable[..., Any], tiny_model: Callable[..., Path]) -> Any:
    return launch_instance(
        tiny_model("qwen3"), env={"ASYNC_RL_TOKEN": TOKEN}, headers={"Authorization": f"Bearer {TOKEN}"}
    )


def state(instance: Any) -> dict[str, Any]:
    counters = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:num_requests_waiting")
    return {
        "version": instance.client.get("/weight_info").json(),
        "paused": instance.client.get("/is_paused").json(),
        "fingerprint": instance.post("/collective_rpc", {"method": "weight_fingerprint"}),
        **{name: instance.metric(name) for name in counters},
    }


def test_the_document_needs_the_token_and_names_every_route(guarded: Any) -> None:
    assert guarded.client.get("/openapi.json", headers={"Authorization": ""}).status_code == 401
    assert {"/inference/v1/generate", "/pause", "/health"} <= set(guarded.client.get("/openapi.json").json()["paths"])


@pytest.mark.parametrize("num_requests", [1000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_a_thousand_bad_requests_and_more_change_nothing(guarded: Any, num_requests: int) -> None:
    def tokens() -> list[list[int]]:
        choices = guarded.generate([5, 6, 7], n=3, seed=3, max_tokens=20)["choices"]
        return [choice["token_ids"] for choice in choices]

    drawn, before = tokens(), state(guarded)
    statuses = fuzz(
        guarded.url, guarded.client.get("/openapi.json").json(), TOKEN, OPEN_PATHS, num_requests=num_requests
    )
    assert guarded.process.poll() is None and guarded.client.get("/health").status_code == 200
    assert state(guarded) == before
    assert tokens() == drawn
    assert statuses.total() >= num_requests
    assert min(statuses[code] for code in (400, 401, 404, 405)) > num_requests / 500
