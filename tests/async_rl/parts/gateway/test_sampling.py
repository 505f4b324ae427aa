"""What is sampled for training has the run's distribution, whatever an agent or a program asks for."""

import inspect
import json
from typing import Any

import httpx
import pytest

from async_rl.config.prompts_section import MAX_STOPS
from async_rl.config.rollout_section import RolloutSection
from async_rl.method.types import Prompt
from async_rl.rollouts.agents.program import Policy
from async_rl.rollouts.agents.program_worker import WorkerPolicy
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.groups.sampling import single_turn_sampling
from async_rl.rollouts.instance.dialect import completion_request, generate_request
from async_rl.shared.protocol.inference import SamplingParams

OTHERS: dict[str, Any] = {
    "temperature": 0.1,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.2,
    "repetition_penalty": 1.3,
    "frequency_penalty": 1.0,
    "presence_penalty": 1.0,
    "min_tokens": 3,
    "ignore_eos": True,
    "logit_bias": {"5": 100},
    "bad_words": ["yes"],
    "allowed_token_ids": [5],
    "guided_choice": ["no"],
    "sampling_params": {"top_k": 3},
    "extra_body": {"top_k": 3},
}


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_nothing_that_a_client_sends_changes_what_is_sampled(rigs: Any, route: str) -> None:
    rig = rigs(lambda context, seed: "yes", temperature=0.7, max_turns=99)
    rollout = rig.open()
    field = {"responses": {"input": "?"}}.get(route, {"messages": [{"role": "user", "content": "?"}]})
    for fields in ({}, *({name: value} for name, value in OTHERS.items()), OTHERS):
        body = json.dumps({"model": "m", **field, **fields})
        assert httpx.post(f"{rollout.access.base_url}/{route}", content=body, timeout=30).status_code == 200
    sampled = [sampling.model_dump(exclude={"seed", "max_tokens"}) for _, sampling in rig.policy.requests]
    assert len(sampled) == len(OTHERS) + 2 and all(each == sampled[0] for each in sampled)
    assert sampled[0]["temperature"] == 0.7


@pytest.mark.parametrize("of", [Policy, WorkerPolicy, RolloutSession])
def test_a_program_cannot_ask_for_another_distribution(of: Any) -> None:
    assert not OTHERS.keys() & inspect.signature(of.generate).parameters.keys()


def test_requests_say_that_the_whole_distribution_is_sampled() -> None:
    """A server whose defaults are those of the checkpoint's generation_config.json would cut it off."""
    whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False}
    params = SamplingParams(temperature=0.7)
    generate = json.loads(generate_request([1], params, "r").model_dump_json(exclude_none=True))["sampling_params"]
    completion = json.loads(completion_request([1], params, "r").model_dump_json(exclude_none=True))
    for sent in (generate, completion):
        assert {name: sent[name] for name in whole} == whole and sent["temperature"] == 0.7


def test_stop_texts_of_a_run_a_part_a_row_and_a_turn_fit_into_one_request() -> None:
    texts = [tuple(f"{kind}{i}" for i in range(MAX_STOPS)) for kind in ("run", "part", "row", "turn")]
    prompt = Prompt("1", (1,), {}, stop=texts[1] + texts[2] + texts[3])
    sampling = single_turn_sampling(RolloutSection(stop=texts[0]), prompt, num_responses=1, temperature=1.0, seed=0)
    assert len(sampling.stop) == 4 * MAX_STOPS
    with pytest.raises(ValueError, match="at most 64"):
        RolloutSection(stop=tuple(map(str, range(MAX_STOPS + 1))))
