"""An instance that sleeps: over the wire, with a real model whose memory leaves and comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.running_instance import Instance, TrainerSide

pytestmark = pytest.mark.distributed

PROMPT = [5, 6, 7, 8]
GREEDY = {"max_tokens": 6, "temperature": 0}


def tokens(instance: Instance) -> list[int]:
    answer: list[int] = instance.generate(PROMPT, **GREEDY)["choices"][0]["token_ids"]
    return answer


def is_sleeping(instance: Instance) -> bool:
    return bool(instance.client.get("/is_sleeping").json()["is_sleeping"])


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> Path:
    """Tied, and with experts, whose weights are views of one tensor."""
    return tiny_model("qwen3_moe", tied=True)


@pytest.fixture(scope="module")
def sleeper(launch_instance: Callable[..., Instance], model_path: Path) -> Instance:
    return launch_instance(model_path, "--asleep")


def test_an_instance_that_begins_asleep_serves_after_a_full_update(
    sleeper: Instance,
    model_path: Path,
    load_reference: Callable[[Path], torch.nn.Module],
    trainer_side: type[TrainerSide],
) -> None:
    assert sleeper.client.get("/health").status_code == 200 and is_sleeping(sleeper)
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": GREEDY}
    refused = sleeper.client.post("/inference/v1/generate", json=body)
    assert refused.status_code == 503 and "sleeps, without weights" in refused.text
    assert "call /wake_up before resuming" in str(sleeper.post("/resume", status=400))
    sleeper.post("/pause")
    assert "/wake_up?tags=weights" in str(sleeper.post("/start_weight_update", status=500))
    sleeper.post("/wake_up?tags=weights")
    health = sleeper.client.get("/health")
    assert health.status_code == 503 and "dropped for a sleep" in health.text
    model = load_reference(model_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    side = trainer_side([sleeper])
    side.publish(model, "v1")
    sleeper.post("/wake_up?tags=kv_cache")
    assert not is_sleeping(sleeper)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=[])  # type: ignore[operator]
    assert tokens(sleeper) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("tags", ["", "?tags=weights&tags=kv_cache"])
def test_level_1_keeps_the_weights(
    launch_instance: Callable[..., Instance], tiny_model: Callable[..., Path], tags: str, instance: Instance
) -> None:
    awake = tokens(instance)
    answer: Any = instance.client.post("/sleep", params={"level": 1})
    assert answer.json() == {"status": "sleeping", "level": 1} and is_sleeping(instance)
    # Twice does no harm.
    instance.post("/sleep?level=1")
    instance.post(f"/wake_up{tags}")
    assert not is_sleeping(instance) and tokens(instance) == awake


def test_level_0_only_pauses(instance: Instance) -> None:
    awake = tokens(instance)
    instance.post("/sleep?level=0")
    assert instance.client.get("/is_paused").json() == {"is_paused": True}
    instance.post("/wake_up?tags=scheduling")
    assert tokens(instance) == awake


def test_an_update_that_a_lost_trainer_left_unfinished_ends_with_a_sleep_that_drops_weights(
    launch_instance: Callable[..., Instance],
    model_path: Path,
    load_reference: Callable[[Path], torch.nn.Module],
    trainer_side: type[TrainerSide],
) -> None:
    instance = launch_instance(model_path)
    expected = tokens(instance)
    instance.post("/pause")
    instance.post("/start_weight_update")
    assert "weight update is going on" in str(instance.post("/sleep?level=1", status=400))
    instance.post("/sleep?level=2")
    assert is_sleeping(instance)
    instance.post("/wake_up?tags=weights")
    trainer_side([instance]).publish(load_reference(model_path), "v1")
    instance.post("/wake_up?tags=kv_cache")
    assert tokens(instance) == expected


@pytest.mark.parametrize("query", ["level=3", "level=-1", "level=deep", "mode=wait", "mode=never"])
def test_what_it_does_not_know_is_refused(instance: Instance, query: str) -> None:
    refused = instance.client.post(f"/sleep?{query}")
    assert refused.status_code == 400
    assert instance.client.post("/wake_up?tags=coffee").status_code == 400
    assert not is_sleeping(instance)
