"""The wire alone: what a client may rely on. Set ASYNC_RL_CONTRACT_URL to run it against another server, e.g. vLLM's.

The server must serve the tiny Qwen3 of these tests (vocabulary 96, 256 positions) under the name "tiny", be fresh, and
be started by `async-rl serve`, whose answers say which process makes them. If it asks for a bearer token, set
ASYNC_RL_TOKEN, too.
"""

import os
import re
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.distributed

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> httpx.Client:
    token = os.environ.get("ASYNC_RL_TOKEN")
    url = os.environ.get("ASYNC_RL_CONTRACT_URL") or request.getfixturevalue("instance").url
    return httpx.Client(
        base_url=url,
        timeout=60,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        # vLLM closes a connection after an answer of 500 without saying so in its headers.
        limits=httpx.Limits(max_keepalive_connections=0),
    )


@pytest.fixture(scope="module")
def generate(client: httpx.Client) -> Callable[..., httpx.Response]:
    def call(token_ids: list[int], model: str | None = "tiny", **params: Any) -> httpx.Response:
        body = {"model": model, "token_ids": token_ids, "sampling_params": {"max_tokens": 4, **params}}
        return client.post("/inference/v1/generate", json=body)

    return call


def assert_error(answer: httpx.Response, code: int) -> str:
    assert answer.status_code == code, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["code"] == code
    return str(error["message"])


def test_health_and_ping_are_empty_200(client: httpx.Client) -> None:
    for path in ("/health", "/ping"):
        answer = client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_answers_and_refusals_name_the_process_and_how_many_responses_it_takes(
    client: httpx.Client, generate: Callable[..., httpx.Response]
) -> None:
    refused = [generate(PROMPT, n=0), client.get("/no_such_route"), client.post("/collective_rpc", json={})]
    body = {"model": "tiny", "token_ids": PROMPT, "stream": True, "sampling_params": {"max_tokens": 2}}
    streamed = client.post("/inference/v1/generate", json=body)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    answers = [client.get("/health"), client.get("/metrics"), generate(PROMPT), streamed, *refused]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 400, 404, 400]
    assert len({answer.headers["x-async-rl-boot-id"] for answer in answers}) == 1
    assert all(int(answer.headers["x-async-rl-max-concurrency"]) >= 1 for answer in answers)


def test_version_and_models_say_who_serves_what(client: httpx.Client) -> None:
    assert client.get("/version").json()["version"]
    card = client.get("/v1/models").json()["data"][0]
    assert card["id"] == "tiny" and card["object"] == "model" and card["max_model_len"] == 256


def test_unknown_route_is_404_with_detail(client: httpx.Client) -> None:
    answer = client.post("/no_such_route", json={})
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


def test_generate_returns_tokens_logprobs_and_versions_per_choice(generate: Callable[..., httpx.Response]) -> None:
    body = generate(PROMPT, n=3, logprobs=0, ignore_eos=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"].items() >= {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}.items()
    for choice in body["choices"]:
        assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert all(entry["logprob"] < 0 and entry["rank"] >= 1 for entry in content)
        spans = choice["weight_versions"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, 4)


def test_without_logprobs_there_are_none(generate: Callable[..., httpx.Response]) -> None:
    assert generate(PROMPT).json()["choices"][0]["logprobs"] is None


def test_top_logprobs_begin_with_the_sampled_token(generate: Callable[..., httpx.Response]) -> None:
    for entry in generate(PROMPT, logprobs=3, temperature=0.0).json()["choices"][0]["logprobs"]["content"]:
        top = entry["top_logprobs"]
        assert len(top) == 3 and top[0]["token_id"] == entry["token_id"]
        assert [t["logprob"] for t in top] == sorted((t["logprob"] for t in top), reverse=True)


def test_child_j_uses_seed_plus_j(generate: Callable[..., httpx.Response]) -> None:
    def tokens(**params: Any) -> list[list[int]]:
        return [choice["token_ids"] for choice in generate(PROMPT, **params).json()["choices"]]

    assert tokens(n=2, seed=11) == tokens(seed=11) + tokens(seed=12)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_what_top_k_and_top_p_leave_out_is_not_sampled(
    generate: Callable[..., httpx.Response], params: dict[str, Any]
) -> None:
    likeliest = generate(PROMPT, temperature=0.0, ignore_eos=True).json()["choices"][0]["token_ids"]
    for choice in generate(PROMPT, n=8, temperature=2.0, logprobs=0, ignore_eos=True, **params).json()["choices"]:
        assert choice["token_ids"] == likeliest
        # Of the distribution that was sampled, in which nothing else is left.
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx([0.0] * 4, abs=1e-4)


def test_stop_token_is_part_of_the_response(generate: Callable[..., httpx.Response]) -> None:
    free = generate(PROMPT, temperature=0.0, ignore_eos=True).json()["choices"][0]["token_ids"]
    stop = free[1]
    choice = generate(PROMPT, temperature=0.0, ignore_eos=True, stop_token_ids=[stop]).json()["choices"][0]
    assert choice["token_ids"] == free[: free.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions", "/abort_requests"])
@pytest.mark.parametrize("body", ["[" * 200_000, "{", "\ud800".encode(errors="surrogatepass"), "[1e999999]"])
def test_what_is_no_json_of_a_request_is_400(client: httpx.Client, path: str, body: str | bytes) -> None:
    """vLLM has FastAPI's body for one that is nested too deeply, the protocol's for others."""
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    if len(body) < 100:
        assert_error(answer, 400)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_bad_prompts_are_400(client: httpx.Client, path: str) -> None:
    for prompt in ([], [5, 96], [5, -1], list(range(2, 90)) * 3, None):
        if path == "/v1/completions":
            body: dict[str, Any] = {"model": "tiny", "prompt": prompt}
        else:
            body = {"model": "tiny", "token_ids": prompt, "sampling_params": {}}
        assert_error(client.post(path, json=body), 400)


@pytest.mark.parametrize(
    "params",
    [
        {"n": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 2.0},
        {"logprobs": 21},
        {"max_tokens": 0},
    ],
    ids=lambda p: next(iter(p)),
)
def test_sampling_values_out_of_range_are_400(generate: Callable[..., httpx.Response], params: dict[str, Any]) -> None:
    assert_error(generate(PROMPT, **params), 400)


def test_unknown_model_is_404(client: httpx.Client, generate: Callable[..., httpx.Response]) -> None:
    assert "nobody" in assert_error(generate(PROMPT, model="nobody"), 404)
    assert_error(client.post("/v1/completions", json={"model": "nobody", "prompt": PROMPT}), 404)


def test_completions_number_choices_prompt_by_prompt(client: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "prompt": [PROMPT, [9, 10]],
        "n": 2,
        "max_tokens": 3,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    answer = client.post("/v1/completions", json=body).json()
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [PROMPT, PROMPT, [9, 10], [9, 10]]
    assert answer["usage"]["completion_tokens"] == 12
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 3
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_completions_take_and_return_text(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 2, "return_token_ids": True, "ignore_eos": True}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [len(choice["prompt_token_ids"]) for choice in choices] == [2, 1]
    assert all(isinstance(choice["text"], str) for choice in choices)
    single = client.post("/v1/completions", json={**body, "prompt": "ab"}).json()["choices"]
    assert single[0]["prompt_token_ids"] == choices[0]["prompt_token_ids"]


def test_pause_resume_and_is_paused(client: httpx.Client) -> None:
    assert client.get("/is_paused").json() == {"is_paused": False}
    for mode in ("abort", "wait", "keep"):
        assert client.post("/pause", params={"mode": mode}).json() == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        assert client.get("/health").status_code == 200
    assert client.post("/resume").json() == {"status": "resumed"}
    assert client.post("/resume").json() == {"status": "resumed"}
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_pause_mode_must_be_known(client: httpx.Client) -> None:
    assert_error(client.post("/pause", params={"mode": "stop"}), 400)


def test_world_size_and_weight_info(client: httpx.Client) -> None:
    assert client.get("/get_world_size", params={"include_dp": "true"}).json() == {"world_size": 1}
    assert client.get("/weight_info").json() == {"weight_version": "default"}


def test_weight_calls_out_of_order_are_errors(client: httpx.Client) -> None:
    update = {"update_info": {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[96, 32]]}}
    assert_error(client.post("/update_weights", json=update), 500)
    assert_error(client.post("/finish_weight_update", json={}), 500)
    assert_error(client.post("/update_weights", json={}), 400)
    assert_error(client.post("/init_weight_transfer_engine", json={}), 400)
    assert client.get("/health").status_code == 200


def test_collective_rpc_needs_a_known_method(client: httpx.Client) -> None:
    assert_error(client.post("/collective_rpc", json={}), 400)
    assert "no_such_method" in assert_error(client.post("/collective_rpc", json={"method": "no_such_method"}), 500)


def test_the_nccl_of_its_worker_is_told(client: httpx.Client) -> None:
    (answer,) = client.post("/collective_rpc", json={"method": "nccl_version"}).json()["results"]
    assert re.fullmatch(r"(none|\d+\.\d+\.\d+) \(torch \d\S+\)", answer)


def test_abort_without_requests_counts_none(client: httpx.Client) -> None:
    assert client.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 0}


def test_metrics_have_vllms_names(client: httpx.Client, generate: Callable[..., httpx.Response]) -> None:
    generate(PROMPT)
    text = client.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_success_total",
    ):
        assert f"\n{name}" in text


def test_a_trainer_that_was_replaced_is_refused_everywhere(client: httpx.Client) -> None:
    """By its term: an instance serves the newest trainer of a run, and other runs as before."""

    def status(method: str, path: str, term: str | None, **options: Any) -> int:
        headers = {} if term is None else {"X-Async-RL-Term": term}
        answer = client.request(method, path, headers=headers, **options)
        if answer.status_code == 409:
            assert answer.json()["error"] | {"message": ""} == {
                "message": "",
                "type": "Conflict",
                "param": "term",
                "code": 409,
            }
        return answer.status_code

    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/health", {}),
        ("POST", "/inference/v1/generate", {"json": body}),
        ("POST", "/pause?mode=wait", {}),
        ("POST", "/resume", {}),
    ]
    run = f"contract-{uuid.uuid4().hex}"
    for term, expected in ((f"{run}:1", 200), (f"{run}:2", 200), (f"{run}:1", 409), (f"{run}:2", 200), (None, 200)):
        assert [status(method, path, term, **options) for method, path, options in calls] == [expected] * len(calls)
    assert status("GET", "/health", f"other-{run}:1") == 200
    assert status("GET", "/health", "no term") == 400
