"""Models with gated delta nets in the embedded engine are those of transformers, token by token and chunk by chunk."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.errors import ConfigError
from async_rl.shared.delta_rule import CHUNK_ROWS
from async_rl.shared.protocol.inference import SamplingParams
from inference_service.api.app import ServerInfo, make_app
from inference_service.engine.cache_size import CacheSize, plan_cache
from inference_service.engine.delta_net import delta_net_of
from inference_service.engine.kernels import EXACT
from inference_service.engine.kv_store import KVStore
from inference_service.engine.model import load_model
from inference_service.engine.sampling import sample_step
from inference_service.engine.schedule import Schedule
from inference_service.engine.sequences import Sequence
from inference_service.engine.step import ModelStep
from inference_service.engine.transformers_engine import TransformersEngine
from tests.support.tiers import at_night
from tests.support.tiny_model import make_tiny_model

CPU = torch.device("cpu")

TOLERANCE = 1e-5
"""Of a log-prob in float32. Of any that is larger than 1: relative to it."""

LENGTHS = (1, 2, 3, 4, 5, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, CHUNK_ROWS + 2, 2 * CHUNK_ROWS + 1, 140)
"""Of prompts: about the ends of the convolution, of chunks, and of the store's places, which have 64 tokens, too."""

CASES: dict[str, dict[str, int]] = {
    # All experts, so that rounding cannot choose others.
    "qwen3_next": {"num_experts_per_tok": 4},
    "qwen3_5_text": {"num_hidden_layers": 4, "full_attention_interval": 4},
    # Without attention, and without gated delta nets.
    "no attention": {"full_attention_interval": 9},
    "no delta net": {"full_attention_interval": 1},
    "wide": {"linear_conv_kernel_dim": 7, "linear_num_value_heads": 6},
}


def store_of(size: CacheSize, num_routes: int) -> KVStore:
    return KVStore(
        size.num_layers,
        size.num_kv_heads,
        size.head_dim,
        size.dtype,
        CPU,
        size.max_tokens,
        num_routes=num_routes,
        delta=size.delta,
        state_tokens=size.state_tokens,
    )


@torch.inference_mode()
@pytest.mark.parametrize(("case", "prefill_tokens"), [*((case, 512) for case in CASES), at_night("qwen3_next", 7)])
def test_greedy_responses_of_all_lengths_together_are_those_of_transformers(
    case: str, prefill_tokens: int, rng: random.Random, tmp_path: Path
) -> None:
    """Also the log-probs of every token of the vocabulary that the engine draws from."""
    family = case if case in ("qwen3_next", "qwen3_5_text") else "qwen3_5_text"
    path = make_tiny_model(tmp_path / "model", family, seed=rng.randrange(2**31), **CASES[case])
    model = load_model(str(path), CPU, torch.float32).model
    step = ModelStep(model)
    store = store_of(plan_cache(model.config, torch.float32, CPU, 64, 256), step.routes.width)
    schedule = Schedule(store, 64, prefill_tokens)
    sequences = []
    for length in LENGTHS:
        prompt = tuple(rng.randrange(2, 96) for _ in range(length))
        for max_tokens in (1, 6, 70):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            sequences.append(Sequence(prompt, params, 0, frozenset()))
    schedule.add(sequences)
    drawn: dict[Sequence, list[torch.Tensor]] = {sequence: [] for sequence in sequences}
    while schedule.has_work:
        drawing = step(schedule.next(), store.generation)
        samples = sample_step(drawing.logits, [run.sequence for run in drawing.runs], "processed_logprobs", "v")
        for run, logits, sample in zip(drawing.runs, drawing.logits, samples, strict=True):
            drawn[run.sequence].append(logits.double().log_softmax(-1))
            run.sequence.samples.append(sample)
            if not run.sequence.remaining_tokens:
                schedule.finish(run)
    reference, rounding = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
        for dtype in (torch.float64, torch.float32)
    )
    for sequence in sequences:
        tokens, begin = sequence.token_ids(), len(sequence.prompt)
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)[begin - 1 : -1]
        found, tolerance = torch.stack(drawn[sequence]), TOLERANCE
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            # The norm of a state's output that nearly vanishes amplifies rounding: as much as transformers' own.
            own = (decoded(rounding, tokens, begin) - expected).abs() / expected.abs().clamp(min=1.0)
            tolerance = max(TOLERANCE, 2 * float(own.max()))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        likeliest = expected.amax(-1) - expected.gather(-1, torch.tensor(tokens[begin:])[:, None])[:, 0]
        assert float(likeliest.max()) <= 2 * tolerance * max(1.0, float(-expected.amin()))


def decoded(model: Any, tokens: list[int], begin: int) -> torch.Tensor:
    """Log-probs of all tokens after a prompt of `begin`, as transformers decodes them, [tokens - begin, vocabulary]."""
    output = model(torch.tensor([tokens[:begin]]), use_cache=True)
    logits = [output.logits[0, -1]]
    for token in tokens[begin:-1]:
        output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0, -1])
    return torch.stack(logits).double().log_softmax(-1)


def test_a_state_is_counted_with_the_cache(tiny_model: Callable[..., Path]) -> None:
    """What the store's tensors take is what the plan says: keys of layers with attention only, states of the others."""
    model = load_model(str(tiny_model("qwen3_next", num_hidden_layers=3)), CPU, torch.float32).model
    size = plan_cache(model.config, torch.float32, CPU, 4, 128)
    store = store_of(size, 6)
    place = store.new(1, is_shared=False)
    assert place.state is not None
    of_token, of_state = (
        sum(tensor[0].numel() * tensor.element_size() for tensors in shelf.tensors for tensor in tensors)
        for shelf in (place.shelf, place.state.shelf)
    )
    of_token //= place.shelf.capacity
    assert of_token == 4 * (2 * 1 * 2 * 16) + 2 * 6
    assert of_state == 4 * 2 * (4 * 8 * 12 + 3 * (2 * 2 * 8 + 4 * 12))
    assert size.state_tokens == -(-of_state // of_token)
    assert store.num_tokens == place.shelf.capacity + size.state_tokens


def test_all_responses_run_at_once_with_their_states(tiny_model: Callable[..., Path]) -> None:
    model = load_model(str(tiny_model("qwen3_5_text")), CPU, torch.float32).model
    for num_per_prompt in (1, 8):
        size = plan_cache(model.config, torch.float32, CPU, 16, 100)
        store = store_of(size, 0)
        schedule = Schedule(store, 16, 512)
        sequences = [
            Sequence((2 + i // num_per_prompt, *range(3, 52)), SamplingParams(max_tokens=50), i, frozenset())
            for i in range(16)
        ]
        schedule.add(sequences)
        schedule.next()
        assert len(schedule.running) == 16


def answers(path: Path, size_for: int, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Those of groups of four that are asked at once, over HTTP, with room for `size_for` responses of any length."""

    async def play() -> list[dict[str, Any]]:
        loaded = load_model(str(path), CPU, torch.float32)
        size = plan_cache(loaded.model.config, torch.float32, CPU, size_for, 256)
        engine = TransformersEngine(loaded, replace(size, max_concurrency=8), 256, "processed_logprobs")
        await engine.start()
        transport = httpx.ASGITransport(make_app(engine, None, ServerInfo("tiny", "tiny"), None))
        params = {"n": 4, "seed": 5, "max_tokens": 150, "ignore_eos": True, "logprobs": 0}
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:
                asked = [
                    client.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params})
                    for prompt in prompts
                ]
                return [answer.raise_for_status().json() for answer in await asyncio.gather(*asked)]
        finally:
            engine.close()

    return asyncio.run(play())


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5_text", marks=pytest.mark.nightly)])
def test_responses_that_wait_again_for_room_of_states_are_answered_as_with_room_for_all(
    family: str, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model", family, **CASES[family])
    prompts = [[rng.randrange(2, 96) for _ in range(length)] for length in (60, 67)]
    num_put_back = 0
    put_back_last = Schedule._put_back_last

    def counted(schedule: Schedule) -> None:
        nonlocal num_put_back
        num_put_back += 1
        put_back_last(schedule)

    monkeypatch.setattr(Schedule, "_put_back_last", counted)
    expected = answers(path, 8, prompts)
    assert num_put_back == 0
    found = answers(path, 1, prompts)
    assert num_put_back > 0
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(path, **settings).eval()
    for prompt, answer, roomy in zip(prompts, found, expected, strict=True):
        for choice, undisturbed in zip(answer["choices"], roomy["choices"], strict=True):
            tokens = choice["token_ids"]
            assert tokens == undisturbed["token_ids"] and len(tokens) == 150
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            theirs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            ours = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=1e-4)


def test_what_the_engine_does_not_compute_is_refused(tiny_model: Callable[..., Path]) -> None:
    model = load_model(str(tiny_model("qwen3_5_text")), CPU, torch.float32).model
    with pytest.raises(ConfigError, match=r"of 'qwen3_5_text': exact mode .* is for models without linear attention"):
        ModelStep(model, EXACT)
    assert delta_net_of(load_model(str(tiny_model("llama")), CPU, torch.float32).model.config) is None
