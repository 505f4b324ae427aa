"""What is generated: the model's own probabilities, seeds, parameters, and requests that end early."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

PROMPT = [5, 6, 7, 8, 9]
LONG = {"max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], load_reference: Callable[[Path], torch.nn.Module]) -> torch.nn.Module:
    return load_reference(tiny_model("qwen3"))


def logprobs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("prompt", [PROMPT, [7], [2 + i % 90 for i in range(70)]], ids=["short", "one token", "pages"])
def test_logprobs_are_the_models_own(
    instance: Any, model: torch.nn.Module, reference: Callable[..., list[float]], prompt: list[int]
) -> None:
    # The second call finds the prompt's pages in the prefix cache.
    for _ in range(2):
        choices = instance.generate(prompt, n=4, max_tokens=40, temperature=0.7, ignore_eos=True)["choices"]
        assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
        for choice in choices:
            assert logprobs(choice) == pytest.approx(reference(model, prompt, choice["token_ids"], 0.7), abs=1e-4)


@pytest.mark.parametrize("length", [32, 33, 64, 65])
def test_prompts_around_a_page_end_work_twice(
    instance: Any, model: torch.nn.Module, reference: Callable[..., list[float]], length: int
) -> None:
    prompt = [3 + (i * 7 + length) % 90 for i in range(length)]
    for _ in range(2):
        for choice in instance.generate(prompt, n=3, max_tokens=5)["choices"]:
            assert logprobs(choice) == pytest.approx(reference(model, prompt, choice["token_ids"]), abs=1e-4)


def test_more_requests_than_places_are_all_answered(
    launch_instance: Callable[..., Any],
    tiny_model: Callable[..., Path],
    model: torch.nn.Module,
    reference: Callable[..., list[float]],
) -> None:
    small = launch_instance(tiny_model("qwen3"), "--max-concurrency", "4", "--max-model-len", "64")

    def ask(i: int) -> tuple[list[int], dict[str, Any]]:
        prompt = [10 + i, *range(3, 3 + 5 * i)]
        return prompt, small.generate(prompt, n=6, max_tokens=14, seed=100 * i)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(8)))
    for prompt, answer in answers:
        for choice in answer["choices"]:
            assert logprobs(choice) == pytest.approx(reference(model, prompt, choice["token_ids"]), abs=1e-4)
    assert small.client.get("/v1/models").json()["data"][0]["max_model_len"] == 64


def test_raw_logprobs_ignore_the_temperature(
    launch_instance: Callable[..., Any],
    tiny_model: Callable[..., Path],
    load_reference: Callable[[Path], torch.nn.Module],
    reference: Callable[..., list[float]],
) -> None:
    path = tiny_model("llama", tied=True)
    raw = launch_instance(path, "--logprobs-mode", "raw_logprobs")
    choice = raw.generate(PROMPT, max_tokens=20, temperature=0.5, top_k=5)["choices"][0]
    assert logprobs(choice) == pytest.approx(reference(load_reference(path), PROMPT, choice["token_ids"]), abs=1e-4)


def test_seeded_requests_do_not_depend_on_their_company(instance: Any) -> None:
    def ask(seed: int) -> list[list[int]]:
        return [c["token_ids"] for c in instance.generate(PROMPT, n=2, max_tokens=30, seed=seed)["choices"]]

    alone = [ask(seed) for seed in range(0, 40, 4)]
    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(ask, range(0, 40, 4)))
    assert together == alone


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
def test_a_seeded_response_cut_anywhere_is_continued_with_the_very_same_tokens(
    instance: Any, params: dict[str, Any]
) -> None:
    whole = instance.generate(PROMPT, n=3, seed=50, max_tokens=40, **params)["choices"]
    for child, choice in enumerate(whole):
        tokens = choice["token_ids"]
        for cut in {1, 2, 7, 27, len(tokens) - 1} & set(range(1, len(tokens))):
            rest = instance.generate([*PROMPT, *tokens[:cut]], seed=50 + child, max_tokens=40 - cut, **params)
            assert rest["choices"][0]["token_ids"] == tokens[cut:]
            assert rest["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_unseeded_requests_differ(instance: Any) -> None:
    answers = {tuple(instance.generate(PROMPT, max_tokens=20)["choices"][0]["token_ids"]) for _ in range(5)}
    assert len(answers) == 5


def test_greedy_is_the_most_likely_token(instance: Any, model: torch.nn.Module) -> None:
    tokens = instance.generate(PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True)["choices"][0]["token_ids"]
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for token in tokens:
            assert int(model(ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_truncated_probabilities_are_renormalized(instance: Any) -> None:
    content = instance.generate(PROMPT, max_tokens=20, top_k=2, logprobs=2)["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert entry["rank"] <= 2
        total = sum(torch.tensor(t["logprob"]).exp().item() for t in entry["top_logprobs"][:2])
        assert total == pytest.approx(1.0, abs=1e-5)


def test_no_stop_token_before_min_tokens(instance: Any) -> None:
    # A stop set of half the vocabulary ends an ordinary response within a few tokens.
    stops = list(range(2, 50))
    short = instance.generate(PROMPT, n=8, max_tokens=30, stop_token_ids=stops, seed=0)["choices"]
    assert min(len(choice["token_ids"]) for choice in short) < 6
    for choice in instance.generate(PROMPT, n=8, max_tokens=30, stop_token_ids=stops, min_tokens=6, seed=0)["choices"]:
        assert len(choice["token_ids"]) >= 6
        assert not set(choice["token_ids"][:6]) & {1, *stops}


def test_repetition_penalty_is_honoured(instance: Any) -> None:
    plain = instance.generate(PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True)["choices"][0]["token_ids"]
    penalized = instance.generate(PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=5.0)[
        "choices"
    ][0]["token_ids"]
    assert len(set(penalized)) > len(set(plain))


def test_a_text_ends_a_response_with_the_token_that_completes_it(
    instance: Any, tiny_model: Callable[..., Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen3"))
    sampling = {"max_tokens": 40, "ignore_eos": True, "seed": 3, "n": 4}
    for free in instance.generate(PROMPT, **sampling)["choices"]:
        text = tokenizer.decode(free["token_ids"], skip_special_tokens=True)
        stop = text[5:8]
        ended = instance.generate(PROMPT, stop=[stop, "never"], **sampling)["choices"][free["index"]]
        length = next(n for n in range(40) if stop in tokenizer.decode(free["token_ids"][:n], skip_special_tokens=True))
        assert ended["token_ids"] == free["token_ids"][:length] and ended["finish_reason"] == "stop"
        # Continued within the text that ends it, by another instance that only has the tokens.
        begun = free["token_ids"][: length - 1]
        seed = {"seed": 3 + free["index"], "n": 1, "max_tokens": 40 - len(begun), "num_continued": len(begun)}
        (rest,) = instance.generate([*PROMPT, *begun], stop=[stop], **(sampling | seed))["choices"]
        assert [*begun, *rest["token_ids"]] == ended["token_ids"] and rest["finish_reason"] == "stop"


@pytest.mark.parametrize("extra", [{"presence_penalty": 0.5}, {"logit_bias": {"3": 1}}, {"prompt_logprobs": 1}])
def test_parameters_the_engine_lacks_are_refused(instance: Any, extra: dict[str, Any]) -> None:
    body = {"token_ids": PROMPT, "sampling_params": extra}
    answer = instance.client.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400 and next(iter(extra)) in answer.json()["error"]["message"]
    neutral = {"presence_penalty": 0.0, "stop": [], "logit_bias": None, "detokenize": True}
    body["sampling_params"] = {**neutral, "max_tokens": 1}
    assert instance.client.post("/inference/v1/generate", json=body).status_code == 200


def test_prompt_and_max_tokens_beyond_the_model_are_400(instance: Any) -> None:
    body = {"token_ids": [5] * 200, "sampling_params": {"max_tokens": 57}}
    message = instance.client.post("/inference/v1/generate", json=body).json()["error"]["message"]
    assert "200" in message and "57" in message and "256" in message
    body["sampling_params"] = {"max_tokens": 56}
    assert instance.client.post("/inference/v1/generate", json=body).status_code == 200


def test_stop_tokens_that_leave_no_other_token_are_400_with_min_tokens(instance: Any) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"stop_token_ids": list(range(96)), "max_tokens": 3}}
    assert instance.client.post("/inference/v1/generate", json=body).status_code == 200
    body["sampling_params"]["min_tokens"] = 1
    assert "stop_token_ids" in instance.client.post("/inference/v1/generate", json=body).json()["error"]["message"]


def test_body_beyond_the_limit_is_413(instance: Any) -> None:
    answer = instance.client.post("/inference/v1/generate", content=b" " * (33 * 2**20))
    assert answer.status_code == 413
    chunks = (b" " * 2**20 for _ in range(33))
    assert instance.client.post("/inference/v1/generate", content=chunks).status_code == 413


def test_abort_ends_a_request_with_its_tokens_so_far(instance: Any) -> None:
    body = {"token_ids": PROMPT, "request_id": "mine", "sampling_params": {**LONG, "n": 4, "logprobs": 0}}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(instance.client.post, "/inference/v1/generate", json=body)
        wait_for(lambda: instance.metric("vllm:num_requests_running") == 4)
        assert instance.post("/abort_requests", {"request_ids": ["other"]})["aborted"] == 0
        assert instance.post("/abort_requests", {"request_ids": ["mine"]})["aborted"] == 1
        assert answer.result().status_code == 200
    for choice in answer.result().json()["choices"]:
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) < 240
    assert instance.metric("vllm:num_requests_running") == 0


def test_client_that_goes_away_cancels_its_request(instance: Any) -> None:
    before = instance.metric("vllm:generation_tokens_total")
    body = {"token_ids": PROMPT, "sampling_params": {**LONG, "n": 32}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{instance.url}/inference/v1/generate", json=body, timeout=0.15)
    wait_for(lambda: instance.metric("vllm:num_requests_running") == 0, timeout_s=1.0)
    assert instance.tokens_made_beside(40) == 40
    assert instance.metric("vllm:generation_tokens_total") < before + 32 * 240


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_treats_running_requests_by_its_mode(instance: Any, mode: str) -> None:
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(instance.generate, PROMPT, n=32, **LONG)
        wait_for(lambda: instance.metric("vllm:num_requests_running") == 32)
        instance.client.post("/pause", params={"mode": mode}).raise_for_status()
        tokens = instance.metric("vllm:generation_tokens_total")
        waiting = threads.submit(instance.generate, PROMPT, max_tokens=3)
        wait_for(lambda: instance.metric("vllm:num_requests_waiting") == 1)
        if mode != "keep":
            running.result(timeout=60)
        instance.answer_others()
        assert not waiting.done()
        assert running.done() == (mode != "keep")
        assert instance.metric("vllm:generation_tokens_total") == tokens
        instance.post("/resume")
        reasons = {choice["finish_reason"] for choice in running.result()["choices"]}
        assert reasons == ({"abort"} if mode == "abort" else {"length"})
        assert waiting.result()["choices"][0]["finish_reason"] in ("length", "stop")


def test_second_abort_pause_ends_the_requests_that_wait(instance: Any) -> None:
    instance.client.post("/pause").raise_for_status()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(instance.generate, PROMPT)
        wait_for(lambda: instance.metric("vllm:num_requests_waiting") == 1)
        instance.client.post("/pause").raise_for_status()
        choice = waiting.result()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    instance.post("/resume")


def test_server_answers_while_it_generates(instance: Any) -> None:
    done = threading.Event()
    num_answers = 0

    def load() -> None:
        instance.generate(PROMPT, n=16, **LONG)
        done.set()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(load)
        while not done.is_set():
            assert instance.client.get("/health").status_code == 200
            num_answers += 1
    assert num_answers > 5, "one that waited for the generation would be the only one"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e6},
        {"temperature": 1e-5},
        {"top_k": 10**30},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"temperature": 1e6, "min_tokens": 4, "stop_token_ids": list(range(90))},
        {"seed": -(2**63), "n": 3},
        {"seed": 2**63 - 1, "n": 3},
    ],
    ids=str,
)
def test_extreme_values_give_ordinary_answers(instance: Any, params: dict[str, Any]) -> None:
    for choice in instance.generate(PROMPT, **{"max_tokens": 5, **params})["choices"]:
        assert 0 < len(choice["token_ids"]) <= 5 and all(logprob > -1e4 for logprob in logprobs(choice))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_echoed_prompts_have_the_models_log_probs(
    launch_instance: Callable[..., Any],
    tiny_model: Callable[..., Path],
    load_reference: Callable[[Path], torch.nn.Module],
    reference: Callable[..., list[float]],
    family: str,
) -> None:
    """Of prompts that begin alike or are the same, known and new, and of more tokens than one step scores."""
    path = tiny_model(family)
    served, model = launch_instance(path), load_reference(path)
    prompts = [[3 + (i * 7) % 90 for i in range(200)], [5, 6], [7]]
    prompts += [[*prompts[0][:150], *prompts[1]], prompts[0], prompts[0][:180]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            said = choice["logprobs"]
            assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
            expected = reference(model, prompt[:1], prompt[1:]) if prompt[1:] else []
            assert said["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
            # The tokens of this tokenizer are characters.
            assert choice["text"].startswith("".join(said["tokens"][:-1])) and len(said["tokens"]) == len(prompt) + 1
            with torch.inference_mode():
                likeliest = model(torch.tensor([prompt])).logits[0].log_softmax(-1).amax(-1).tolist()
            tops = [max(top.values()) for top in said["top_logprobs"][1:]]
            assert tops == pytest.approx(likeliest, abs=1e-4)
    refused = httpx.post(f"{served.url}/v1/completions", json={**body, "stream": True}, timeout=60)
    assert refused.status_code == 400 and "leave stream or echo out" in refused.text
    refused = httpx.post(f"{served.url}/v1/completions", json={**body, "num_continued": 1}, timeout=60)
    assert refused.status_code == 400 and "num_continued = 1 beside echo and logprobs" in refused.text
