"""Whatever runs together, each token has the probability that the model alone gives it.

Random prompts that share beginnings, in a store with little room and with steps of few prompt tokens, some of them
cancelled, all of them sometimes computed anew; compared with a forward pass of transformers over each whole sequence.
"""

import random
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig, PreTrainedModel

from async_rl.shared.protocol.inference import SamplingParams
from benchmarks.common.random_model import random_model
from inference_service.engine import segments
from inference_service.engine.kv_store import NoRoom
from inference_service.engine.sequences import Sequence
from tests.support.stepped_engine import SteppedEngine
from tests.support.tiny_model import FAMILIES, MODEL_SIZE

pytestmark = pytest.mark.computes

SHORTEST_SHARED = 3
NEAR_TIE = 1e-6
"""Between two experts' router logits: rounding decides there, and whichever it takes is right."""


WITH = {
    "deepseek_v3": {"num_key_value_heads": MODEL_SIZE["num_attention_heads"]},
    "mistral": {"sliding_window": 7},
}


@pytest.fixture(
    scope="module",
    params=[
        # Windows, latents, delta nets, and sinks: beside each of these ordinary layers and experts.
        *("mistral", "deepseek_v3", "qwen3_next", "gpt_oss"),
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in (
                *("qwen3", "qwen3_moe", "smollm3", "granite", "olmo3"),
                *("llama", "ministral3", "olmo2", "glm4_moe", "qwen3_5_text", "minimax_m2"),
            )
        ),
    ],
)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    config_class, own = FAMILIES[request.param]
    config: PreTrainedConfig = config_class(**{**own, **MODEL_SIZE, **WITH.get(request.param, {})})
    return random_model(config).eval()


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MIN_SHARED", SHORTEST_SHARED)


def make_prompts(rng: random.Random, num: int, longest: int) -> list[tuple[int, ...]]:
    """Some equal, some with a common beginning, some the beginning of others."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(num):
        base = list(rng.choice(prompts)) if prompts and rng.random() < 0.7 else []
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.6 else base
        added = rng.randint(0 if kept else 1, longest)
        prompts.append(tuple([*kept, *(rng.randrange(2, 96) for _ in range(added))][:120]))
    return prompts


def in_rounds(rng: random.Random, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    while sequences:
        number = rng.randint(1, 6)
        yield sequences[:number]
        sequences = sequences[number:]


@settings(max_examples=1)
@given(st.integers(0, 2**32), st.sampled_from([2, 4, 16]), st.sampled_from([3, 17, 512]), st.booleans())
def test_each_token_has_the_probability_that_the_model_alone_gives_it(
    model: PreTrainedModel, seed: int, max_running: int, prefill_tokens: int, has_little_room: bool
) -> None:
    require_log_probs(model, seed, max_running, prefill_tokens, has_little_room)


@pytest.mark.nightly
def test_a_token_a_hair_from_another_expert_has_the_probability_that_either_gives_it(model: PreTrainedModel) -> None:
    """3e-8, with qwen3_moe."""
    require_log_probs(model, 1267, 2, 3, False)


@torch.inference_mode()
def require_log_probs(
    model: PreTrainedModel, seed: int, max_running: int, prefill_tokens: int, has_little_room: bool
) -> None:
    rng = random.Random(seed)
    sequences = [
        Sequence(prompt, SamplingParams(max_tokens=rng.randint(1, 90)), rng.randrange(2**32), frozenset())
        for prompt in make_prompts(rng, rng.randint(1, 12), 70)
        for _ in range(rng.choice([1, 1, 4]))
    ]
    engine = SteppedEngine(model, 1100 if has_little_room else 100_000, max_running, prefill_tokens)
    live = set(sequences)
    for some in in_rounds(rng, sequences):
        engine.schedule.add(some)
        for _ in range(rng.randint(0, 30)):
            if engine.schedule.has_work:
                engine.run_step()
        if rng.random() < 0.2:
            live.discard(rng.choice(sequences))
            engine.schedule.keep(live)
        if rng.random() < 0.15:
            engine.schedule.restart()
    while engine.schedule.has_work:
        engine.run_step()
    assert all(sequence.remaining_tokens == 0 for sequence in live)
    assert_log_probs(model, sequences)


@torch.inference_mode()
def assert_log_probs(model: PreTrainedModel, sequences: list[Sequence]) -> None:
    """Those of the model alone."""
    has_experts = hasattr(model.config, "num_experts")
    for sequence in sequences:
        tokens = sequence.token_ids()
        found = model(input_ids=torch.tensor([tokens]), **({"output_router_logits": True} if has_experts else {}))
        expected = found.logits[0].double().log_softmax(-1)[len(sequence.prompt) - 1 : -1]
        assert len(expected) == len(sequence.samples)
        num_judged = num_decided(found.router_logits, model.config.num_experts_per_tok) if has_experts else len(tokens)
        num_judged = max(0, num_judged - len(sequence.prompt) + 1)
        for sample, row in zip(sequence.samples[:num_judged], expected[:num_judged], strict=True):
            assert sample.logprob == pytest.approx(float(row[sample.token_id]), abs=2e-5)


def num_decided(router_logits: Iterable[torch.Tensor], num_chosen: int) -> int:
    """How many tokens come before the first that is near a tie; logits [tokens, experts] of each layer."""
    near = []
    for logits in router_logits:
        sorted_logits = logits.sort(-1, descending=True).values
        near.append(sorted_logits[:, num_chosen - 1] - sorted_logits[:, num_chosen] < NEAR_TIE)
    ties = torch.stack(near).any(0).nonzero()
    return int(ties[0]) if len(ties) else near[0].numel()


def turn(prompt: tuple[int, ...], seed: int, num_tokens: int) -> Sequence:
    return Sequence(prompt, SamplingParams(max_tokens=num_tokens, is_turn=True), seed, frozenset())


@torch.inference_mode()
@settings(max_examples=1)
@given(st.integers(0, 2**32), st.sampled_from([2, 16]), st.sampled_from([3, 512]), st.booleans())
def test_turns_have_the_probabilities_that_the_model_alone_gives_them(
    model: PreTrainedModel, seed: int, max_running: int, prefill_tokens: int, has_little_room: bool
) -> None:
    """Rollouts that go on, branch and begin again, several at once, some of their turns cancelled."""
    rng = random.Random(seed)
    engine = SteppedEngine(model, 1100 if has_little_room else 100_000, max_running, prefill_tokens)
    roots = make_prompts(rng, 2, 20)
    live: list[Sequence] = []
    done: list[Sequence] = []
    while len(done) < 20:
        if len(live) < 5 and rng.random() < 0.3:
            before = rng.choice(done).token_ids() if done and rng.random() < 0.8 else list(rng.choice(roots))
            context = before if rng.random() < 0.8 else before[: rng.randint(1, len(before))]
            said = [rng.randrange(2, 96) for _ in range(rng.randrange(8))]
            live.append(turn((*context[:100], *said), rng.randrange(2**32), rng.randint(1, 12)))
            engine.schedule.add(live[-1:])
        if live and rng.random() < 0.01:
            live.remove(rng.choice(live))
            engine.schedule.keep(set(live))
        if rng.random() < 0.01:
            engine.schedule.restart()
        if engine.schedule.has_work:
            engine.run_step()
        done += [each for each in live if not each.remaining_tokens]
        live = [each for each in live if each.remaining_tokens]
    assert_log_probs(model, done)
    engine.schedule.keep(set())
    while engine.schedule._segments.evict():
        pass
    assert engine.store.num_tokens == 0, "each place was given back"


@torch.inference_mode()
@pytest.mark.parametrize("num_rollouts", [1, 4])
def test_a_later_turn_computes_only_what_is_new(model: PreTrainedModel, num_rollouts: int) -> None:
    engine = SteppedEngine(model, 100_000, 16, 512)
    prompt = tuple(range(2, 42))
    contexts = [prompt] * num_rollouts
    for number in range(8):
        turns = [turn(context, 10 * number + i, 3 + i) for i, context in enumerate(contexts)]
        engine.schedule.add(turns)
        known, num_computed = engine.schedule.num_known, 0
        while engine.schedule.has_work:
            work = engine.schedule.next()
            num_computed += sum(len(fed.token_ids) for fed in work.fed) + len(
                [run for run in work.decoding if not run.sequence.samples]
            )
            engine.compute(work)
        # The last token of a turn was sampled, and not fed; five more are new.
        expected = num_rollouts * (1 + 5)
        if number == 0:
            expected = len(prompt) + (num_rollouts - 1 if engine.store.has_states else 0)
        assert num_computed == expected
        assert engine.schedule.num_known - known == sum(map(len, contexts)) - expected
        contexts = [(*each.token_ids(), *range(50 + number, 55 + number)) for each in turns]
    num_tokens = sum(place.shelf.capacity for shelf in engine.store._shelves.values() for place in shelf.places)
    assert num_tokens <= 2 * (len(prompt) + num_rollouts * 256), "a rollout has one segment, not one for each turn"


def test_a_group_shares_its_prompt_and_continuations_share_it_too(model: PreTrainedModel) -> None:
    engine = SteppedEngine(model, 100_000, 16, 512)
    prompt = tuple(range(2, 72))
    group = [Sequence(prompt, SamplingParams(max_tokens=5), seed, frozenset()) for seed in range(4)]
    continued = [Sequence((*prompt, *(80 + i, 81 + i)), SamplingParams(max_tokens=5), i, frozenset()) for i in range(3)]
    engine.schedule.add([*group, *continued])
    num_computed = 0
    while engine.schedule.has_work:
        work = engine.schedule.next()
        num_computed += sum(len(fed.token_ids) for fed in work.fed)
        engine.compute(work)
    # With states the last token of a prompt is each response's own, and alone.
    assert num_computed == len(prompt) + 3 * 2 - (1 if engine.store.has_states else 0)


def test_one_that_does_not_fit_alone_is_an_error_and_not_an_endless_loop(model: PreTrainedModel) -> None:
    engine = SteppedEngine(model, 128, 4, 512)
    engine.schedule.add([Sequence(tuple(range(2, 90)), SamplingParams(max_tokens=90), 0, frozenset())])
    with pytest.raises(NoRoom):
        while engine.schedule.has_work:
            engine.run_step()
