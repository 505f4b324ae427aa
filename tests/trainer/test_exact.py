"""Exact mode: the trainer's log-probs are the engine's, bit for bit, however either of them divides the work."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.checks.preflight.model import read_shape
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group, Prompt, Response, RolloutFacts, WeightSpan
from async_rl.rollouts.agents.session import RolloutSession, Sessions
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.rollouts.instance.partial_rollout import PartialRollout, request_of
from async_rl.shared.cpu.exact import ROW_MULTIPLE
from async_rl.shared.protocol.inference import SamplingParams
from benchmarks.common.random_model import save_random_qwen3
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.kernels import EXACT
from inference_service.engine.model import LoadedModel
from inference_service.engine.sequences import Sequence as Generated
from inference_service.engine.transformers_engine import TransformersEngine
from tests.support.groups import make_group, make_response
from tests.support.rollout_settings import rollout_section
from tests.support.stepped_engine import SteppedEngine
from tests.support.tiny_model import FAMILIES
from trainer.batching.group_slice import slices_of
from trainer.batching.packing import pack
from trainer.batching.shared_prompt import RowShare, make_micro_batch
from trainer.devices import Device, cpu_exact
from trainer.forward_backward import make_passes
from trainer.hf.weights import load_hf_weights
from trainer.model.gpt import SharedPromptGPT, build_model
from trainer.parallel import Parallel

LONGEST = 1200
"""Tokens of a prompt and a response of equal length: each may be longer than a block of flash attention."""

SIZES = {
    # Sizes that fill no vector, and a dot product longer than MKL's longest chain.
    "ragged": {
        "vocab_size": 203,
        "hidden_size": 72,
        "intermediate_size": 212,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
    },
    "wide": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


@pytest.fixture(scope="module", params=SIZES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_random_qwen3(path, **SIZES[request.param])
    return path


@pytest.fixture
def exactly(parallel: Parallel, reproducible_products: None) -> Parallel:
    return replace(parallel, device=cast(Device, cpu_exact))


@torch.inference_mode()
def generate(model: PreTrainedModel, rng: random.Random, longest: int, temperature: float) -> list[Group]:
    """Groups whose responses were sampled in an engine with little room, some of them in two requests."""
    engine = SteppedEngine(
        model,
        max_tokens=rng.choice([8, 80]) * max(2 * longest, 64),
        max_running=rng.choice([2, 5, 16]),
        prefill_tokens=rng.choice([7, 64, 2048]),
        kernels=EXACT,
    )
    prompts: list[tuple[int, ...]] = []
    most = 2 if longest > 200 else 4
    for _ in range(rng.randint(1, most)):
        begin = rng.choice(prompts)[: rng.randint(0, longest)] if prompts and rng.random() < 0.5 else ()
        own = [rng.randrange(1, model.config.vocab_size) for _ in range(rng.randint(1, longest))]
        prompts.append((*begin, *own)[:longest])
    sequences = {
        (p, i): new_sequence(prompt, rng.randint(1, longest), rng.randrange(2**32), temperature)
        for p, prompt in enumerate(prompts)
        for i in range(rng.randint(1, most))
    }
    before: dict[tuple[int, int], Generated] = {}
    waiting = list(sequences.items())
    rng.shuffle(waiting)
    while waiting or engine.schedule.has_work:
        if (waiting and rng.random() < 0.3) or (waiting and not engine.schedule.has_work):
            engine.schedule.add([waiting.pop()[1]])
        if rng.random() < 0.02:
            engine.schedule.restart()
        engine.run_step()
        key = rng.choice(list(sequences))
        if (
            rng.random() < 0.05
            and key not in before
            and 0 < len((old := sequences[key]).samples) < old.params.max_tokens
        ):
            before[key] = old
            waiting.append((key, continued(old, temperature)))
            sequences[key] = waiting[-1][1]
            engine.schedule.keep(set(sequences.values()))
    return [
        make_group(
            p,
            [
                response_of([*(before[key].samples if key in before else ()), *sequences[key].samples])
                for key in sorted(sequences)
                if key[0] == p
            ],
            prompt=prompt,
        )
        for p, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def generate_turns(model: PreTrainedModel, rng: random.Random, temperature: float) -> Group:
    """Rollouts of several turns, each with a branch, whose requests name everything after the prompt as continued."""
    engine = SteppedEngine(model, 4096, rng.choice([2, 16]), rng.choice([7, 64]), EXACT)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, model.config.vocab_size) for _ in range(rng.randint(1, most)))

    def respond(prompt: tuple[int, ...], context: tuple[int, ...]) -> Response:
        token_ids, observed, samples = context, [(0, len(context))] if context else [], []
        for turn in range(rng.randint(1, 3)):
            if turn:
                seen = tokens(30)
                observed.append((len(token_ids), len(token_ids) + len(seen)))
                token_ids += seen
            sequence = new_sequence((*prompt, *token_ids), rng.randint(1, 30), rng.randrange(2**32), temperature)
            sequence.num_continued = len(token_ids)
            engine.schedule.add([sequence])
            while engine.schedule.has_work:
                engine.run_step()
            samples += sequence.samples
            token_ids += tuple(sample.token_id for sample in sequence.samples)
        own = response_of(samples)
        return replace(own, token_ids=token_ids, observed=tuple(observed))

    prompt, other = tokens(50), tokens(50)
    responses: list[Response] = []
    for _ in range(4):
        first = respond(prompt, ())
        responses += [first, respond(prompt, (*first.token_ids[: rng.randint(1, 40)], *tokens(5)))]
        responses.append(replace(respond(other, ()), prompt_ids=other))
    return make_group(0, responses, prompt=prompt, rollouts=[RolloutFacts(num_responses=3, num_turns=3)] * 4)


def new_sequence(prompt: tuple[int, ...], num_tokens: int, seed: int, temperature: float) -> Generated:
    return Generated(prompt, SamplingParams(max_tokens=num_tokens, temperature=temperature), seed, frozenset())


def continued(old: Generated, temperature: float) -> Generated:
    """The rest of a response, as the request of another instance would generate it."""
    tokens = tuple(old.token_ids())
    num_left = old.params.max_tokens - len(old.samples)
    sequence = new_sequence(tokens, num_left, old.seed, temperature)
    sequence.num_continued = len(old.samples)
    return sequence


def response_of(samples: Sequence[object]) -> Response:
    return make_response(
        [sample.token_id for sample in samples],  # type: ignore[attr-defined]
        logprobs=[sample.logprob for sample in samples],  # type: ignore[attr-defined]
        finish_reason="length",
    )


def load(path: Path, parallel: Parallel, recompute: str = "none") -> SharedPromptGPT:
    model = build_model(read_shape(path), torch.float32, parallel, TrainerSection(recompute=recompute))
    load_hf_weights(model, path)
    return model


def different(model: SharedPromptGPT, groups: list[Group], max_tokens: int, temperature: float) -> float:
    """The largest gap of all tokens."""
    gaps = []
    for window in pack(groups, max_tokens):
        for each in make_passes([window], model.parallel, temperature, max_tokens):
            for micro_batch, logprobs_N in zip(each.micro_batches, each.logprobs(model), strict=True):
                rollout = [
                    logprob
                    for part in micro_batch.slices
                    for response in part.responses
                    for logprob in response.logprobs
                ]
                gaps.append((logprobs_N.detach().double() - torch.tensor(rollout, dtype=torch.float64)).abs().max())
    return float(torch.stack(gaps).max())


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [*range(1, 4), *(pytest.param(each, marks=pytest.mark.nightly) for each in (0, 4, 5))])
def test_log_probs_are_the_engines_bit_for_bit(
    checkpoint: Path, exactly: Parallel, threads: Callable[[int], None], seed: int
) -> None:
    rng = random.Random(seed)
    temperature = rng.choice([1.0, 0.7, 1.3])
    engine_model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    threads(rng.choice([1, 2]))
    groups = generate(engine_model, rng, LONGEST // 2 if seed == 0 else rng.choice([5, 40, 120]), temperature)
    threads(rng.choice([1, 2]))
    model = load(checkpoint, exactly)
    for max_tokens in (16, 300, 4096):
        assert different(model, groups, max_tokens, temperature) == 0.0


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 2))])
def test_turns_and_branches_are_the_engines_bit_for_bit(checkpoint: Path, exactly: Parallel, seed: int) -> None:
    rng = random.Random(seed)
    engine_model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    group, model = generate_turns(engine_model, rng, 0.9), load(checkpoint, exactly)
    assert any(response.observed for response in group.responses)
    for max_tokens in (40, 300, 4096):
        assert different(model, [group], max_tokens, 0.9) == 0.0


class EnginePool:
    """In place of a pool: the requests of sessions go to an engine in this process, as one or as two."""

    max_model_len = None

    def __init__(self, engine: TransformersEngine, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng

    async def generate_group(
        self, context: Sequence[int], sampling: SamplingParams, request_id: str, version: str, *_: object
    ) -> tuple[list[Response], int]:
        assert sampling.seed is not None
        partial = PartialRollout(sampling.seed)
        for most in (self._rng.randint(1, sampling.max_tokens), sampling.max_tokens):
            if len(partial.token_ids) < sampling.max_tokens:
                prompt, params = request_of(context, sampling, [partial], noise_by_position=True)
                params = params.model_copy(update={"max_tokens": min(most, params.max_tokens)})
                (choice,) = await self._engine.generate(f"{request_id}-{most}", prompt, params)
                partial.token_ids.extend(sample.token_id for sample in choice.samples)
                partial.logprobs.extend(sample.logprob for sample in choice.samples)
        length = len(partial.token_ids)
        partial.spans, partial.finish_reason = [WeightSpan(version, 0, length)], "length"
        return [partial.response()], 1


class NoTexts:
    def batch_decode(self, sequences: Sequence[object], **_: object) -> list[str]:
        return [""] * len(sequences)


async def roll_out(model: PreTrainedModel, rng: random.Random) -> Group:
    """The group of four rollouts at once, whose sessions sample turns, branches, and one turn after another prompt."""
    vocab = model.config.vocab_size

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, vocab) for _ in range(rng.randint(1, most)))

    size = plan_cache(model.config, torch.float32, torch.device("cpu"), 3, 512, EXACT.width)
    engine = TransformersEngine(LoadedModel(model, None, frozenset(), 512), size, 512, "processed_logprobs", EXACT)
    await engine.start()
    prompt, other = Prompt("p", tokens(50), {}), tokens(50)
    limits = rollout_section(max_response_tokens=1000, max_turns=8, temperature=0.9)
    sessions = Sessions(EnginePool(engine, rng), NoTexts(), None, limits)  # type: ignore[arg-type]

    async def one(number: int) -> Trajectory:
        session = RolloutSession(sessions, prompt, "v", number, str(number), 20.0)
        contexts = [prompt.token_ids, prompt.token_ids, other]
        for _ in range(5):
            context = rng.choice(contexts)
            turn = await session.generate(token_ids=context, max_tokens=rng.randint(1, 30))
            contexts += [(*context, *turn.token_ids, *tokens(20)), (*context, *turn.token_ids[:2], *tokens(5))]
        return session.finish()

    try:
        trajectories = await asyncio.gather(*map(one, range(4)))
    finally:
        engine.close()
    return make_group(
        0,
        [response for each in trajectories for response in each.responses],
        prompt=prompt,
        rollouts=[RolloutFacts(num_responses=len(each.responses), num_turns=each.num_turns) for each in trajectories],
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 2))])
def test_rollouts_of_sessions_are_the_engines_bit_for_bit(checkpoint: Path, exactly: Parallel, seed: int) -> None:
    engine_model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    group, model = asyncio.run(roll_out(engine_model, random.Random(seed))), load(checkpoint, exactly)
    assert any(response.observed for response in group.responses)
    assert any(response.prompt_ids for response in group.responses)
    for max_tokens in (40, 4096):
        assert different(model, [group], max_tokens, 0.9) == 0.0


HELD = [
    name
    for name, (_, size) in FAMILIES.items()
    if not {"num_experts", "num_local_experts", "n_routed_experts", "linear_num_key_heads"} & set(size)
    and not size.get("sliding_window")
]
"""Families without experts, windows, and linear attention."""


@pytest.mark.parametrize("family", HELD)
def test_every_family_without_experts_and_windows_is_exact(
    tiny_model: Callable[..., Path], exactly: Parallel, family: str
) -> None:
    # As wide as the models that MKL divides into several sums.
    path = tiny_model(family, tied=family == "qwen2", hidden_size=448, intermediate_size=480, num_attention_heads=8)
    groups = generate(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), random.Random(7), 60, 0.9)
    assert different(load(path, exactly), groups, 512, 0.9) == 0.0


def test_keys_of_few_columns_are_exact(tiny_model: Callable[..., Path], exactly: Parallel) -> None:
    # One product of q, k and v in the trainer; MKL has other kernels for the engine's product of k alone.
    path = tiny_model("qwen3", hidden_size=24, intermediate_size=40, head_dim=8, num_key_value_heads=1)
    groups = generate(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), random.Random(7), 40, 1.3)
    assert different(load(path, exactly), groups, 512, 1.3) == 0.0


def test_gradients_are_the_ordinary_ones(checkpoint: Path, exactly: Parallel, parallel: Parallel) -> None:
    groups = generate(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), random.Random(3), 60, 0.8)
    gradients = []
    for of, recompute in ((parallel, "none"), (exactly, "none"), (exactly, "full")):
        model = load(checkpoint, of, recompute)
        logprobs_N, *_ = model(make_micro_batch(slices_of(groups), torch.device("cpu"), RowShare(ROW_MULTIPLE)), 0.8)
        (logprobs_N * torch.arange(1.0, 1.0 + len(logprobs_N)).sin()).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        for actual in gradients[1:]:
            error = float((actual[name] - expected).norm() / expected.norm())
            assert error < 1e-4, f"{name}: {error:.1e}"


def test_without_it_they_differ(checkpoint: Path, parallel: Parallel) -> None:
    """What the other tests find equal is not equal anyway."""
    engine_model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    groups = generate(engine_model, random.Random(1), 130, 1.0)
    assert 0 < different(load(checkpoint, parallel), groups, 512, 1.0) < 5e-5


def test_its_activation_has_no_part_in_checkpoints(checkpoint: Path, exactly: Parallel, parallel: Parallel) -> None:
    names = [set(load(checkpoint, of).sharded_state_dict()) for of in (exactly, parallel)]
    assert names[0] == names[1]
