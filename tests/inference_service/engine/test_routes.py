"""The experts that the embedded engine reports are those that transformers' routers choose for the same tokens."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.shared.protocol.inference import SamplingParams
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.model import load_model
from inference_service.engine.transformers_engine import TransformersEngine
from inference_service.engine_interface import Choice, RequestRefused

CPU = torch.device("cpu")
LIMIT_S = 120.0


def engine_of(path: Path) -> TransformersEngine:
    loaded = load_model(str(path), CPU, torch.float32)
    return TransformersEngine(loaded, plan_cache(loaded.model.config, torch.float32, CPU, 4, 256), 256, "raw_logprobs")


def chosen_by_transformers(path: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The sets of experts of each row and layer with experts, [rows, layers, k], sorted."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if router is not None:
            router.register_forward_hook(lambda _, __, output: found.append(output[2].sort(1).values))
    routes = []
    for tokens in sequences:
        found.clear()
        with torch.no_grad():
            model(torch.tensor([tokens]), use_cache=False)
        routes.append(torch.stack(found, 1))
    return routes


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("qwen3_next", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2")
        ),
    ],
)
def test_routes_are_those_of_every_token_but_the_last(
    family: str, tiny_model: Callable[..., Path], rng: random.Random
) -> None:
    """Prompts that are computed once for several responses, known from before, or the beginning of another one; turns;
    and more responses than run at once."""
    path = tiny_model(family)
    shared = tuple(rng.randrange(2, 96) for _ in range(50))
    prompts = [shared, shared, shared[:40], (*shared, 7, 8), (5,), tuple(rng.randrange(2, 96) for _ in range(130))]

    async def play(engine: TransformersEngine) -> list[tuple[tuple[int, ...], Choice]]:
        await engine.start()
        params = SamplingParams(n=3, max_tokens=70, logprobs=0, routed_experts=True, is_turn=True)
        try:
            async with asyncio.timeout(LIMIT_S):
                # One after the other, and then all at once.
                first = [await engine.generate("one", prompt, params) for prompt in prompts[:2]]
                told = [*prompts[:2][0], *(sample.token_id for sample in first[0][0].samples)]
                later = await asyncio.gather(
                    *(engine.generate(f"{i}", prompt, params) for i, prompt in enumerate([*prompts, told]))
                )
        finally:
            engine.close()
        asked = [*prompts[:2], *prompts, tuple(told)]
        return [
            (tuple(prompt), choice)
            for prompt, choices in zip(asked, [*first, *later], strict=True)
            for choice in choices
        ]

    answers = asyncio.run(play(engine_of(path)))
    sequences = [(*prompt, *(sample.token_id for sample in choice.samples)) for prompt, choice in answers]
    expected = chosen_by_transformers(path, [sequence[:-1] for sequence in sequences])
    config = AutoModelForCausalLM.from_pretrained(path).config
    num_dense = getattr(config, "first_k_dense_replace", 0)
    for (_, choice), sequence, chosen in zip(answers, sequences, expected, strict=True):
        assert choice.routes is not None and choice.routes.dtype == "uint8"
        assert choice.routes.shape[:2] == (len(sequence) - 1, config.num_hidden_layers)
        routes = torch.from_numpy(choice.routes[:, num_dense:]).long().sort(2).values
        # Two experts may be as likely as rounding leaves it, of weights at random.
        assert (routes != chosen).any(-1).sum() <= len(sequence) // 25


def test_they_come_if_they_are_asked_for_and_a_dense_model_has_none(tiny_model: Callable[..., Path]) -> None:
    async def play(engine: TransformersEngine, **asked: bool) -> Choice:
        await engine.start()
        try:
            (choice,) = await engine.generate("one", (5, 6), SamplingParams(max_tokens=3, **asked))
        finally:
            engine.close()
        return choice

    assert asyncio.run(play(engine_of(tiny_model("qwen3_moe")))).routes is None
    with pytest.raises(RequestRefused, match="the model has no experts to report"):
        asyncio.run(play(engine_of(tiny_model("qwen3")), routed_experts=True))
