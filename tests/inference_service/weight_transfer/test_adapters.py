"""Adapters that an instance receives alone: whole or not at all, and only beside the base that they are for.

The trainer's side is in this process, the instance in its own; log-probs are compared with peft's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from async_rl.config.adapter_section import AdapterSection
from async_rl.shared.protocol.adapter import WEIGHTS_FILE, adapter_fingerprint
from async_rl.shared.protocol.inference import UpdateInfo
from async_rl.shared.weights.fingerprint import Fingerprint, TensorSpec, base_digest
from inference_service.engine_interface import EngineFault, RequestRefused
from inference_service.weight_transfer.receiver import parameter_views, specs_of
from inference_service.weight_transfer.weight_update import Phase, WeightUpdate
from tests.inference_service.weight_transfer.test_weight_update import PROMPT, assert_serves
from tests.support.adapter_faults import ALONE, AlonePlant
from tests.support.running_instance import Instance
from tests.support.trainer.random_adapters import random_adapters

pytestmark = pytest.mark.distributed

Factors = Mapping[str, torch.Tensor]
OTHER_DIGEST = "0" * 32


def digest_of(model: torch.nn.Module) -> str:
    views = parameter_views(model)
    return base_digest((specs_of(views)[name], view) for name, view in views.items())


def update_of(factors: Factors, adapter: AdapterSection, base: str, snapshot: Path | None = None) -> dict[str, Any]:
    return {
        "names": list(factors),
        "dtype_names": [str(factor.dtype).removeprefix("torch.") for factor in factors.values()],
        "shapes": [list(factor.shape) for factor in factors.values()],
        "snapshot": None if snapshot is None else str(snapshot),
        "adapter": {"rank": adapter.rank, "alpha": adapter.alpha, "base": base},
    }


def fingerprint_of(factors: Factors, adapter: AdapterSection, base: str) -> str:
    fingerprint = Fingerprint()
    for name, factor in factors.items():
        spec = TensorSpec(name, "float32", tuple(factor.shape))
        fingerprint.add(spec, factor.contiguous().view(-1).view(torch.uint8))
    return adapter_fingerprint(fingerprint.hexdigest(), base, {adapter.scale})


@pytest.fixture
def peft_model(
    tiny_model: Callable[..., Path], tmp_path: Path, load_reference: Callable[[Path], torch.nn.Module]
) -> Iterator[tuple[AdapterSection, Factors, torch.nn.Module, torch.nn.Module]]:
    """Random adapters for the instance's model: settings, factors, the base, and peft's model of both."""
    base = load_reference(tiny_model("qwen3"))
    adapter = random_adapters(tiny_model("qwen3"), tmp_path / "adapters")
    assert adapter.path is not None
    both = PeftModel.from_pretrained(load_reference(tiny_model("qwen3")), adapter.path)
    yield adapter, load_file(adapter.path / WEIGHTS_FILE), base, both


def put(instance: Instance, version: str, update: Mapping[str, Any]) -> None:
    """From a snapshot."""
    instance.client.post("/pause").raise_for_status()
    instance.post("/start_weight_update")
    instance.post("/update_weights", {"update_info": update})
    instance.post("/finish_weight_update", {"weight_version": version})
    instance.post("/resume")


def rpc(instance: Instance, method: str) -> Any:
    return instance.post("/collective_rpc", {"method": method})["results"][0]


@pytest.fixture(scope="module")
def served(launch_instance: Callable[..., Instance], tiny_model: Callable[..., Path]) -> Instance:
    return launch_instance(tiny_model("qwen3"))


def test_an_instance_computes_with_adapters_beside_its_base_as_peft_does_until_whole_weights_come(
    served: Instance,
    peft_model: Any,
    tmp_path: Path,
    trainer_side: Any,
    reference: Callable[..., list[float]],
) -> None:
    adapter, factors, base, both = peft_model
    digest = digest_of(base)
    assert rpc(served, "base_digest") == digest
    file = tmp_path / "adapters.safetensors"
    save_file(dict(factors), file)
    put(served, "beside", update_of(factors, adapter, digest, file))
    assert_serves(served, both, "beside", reference)
    assert rpc(served, "weight_fingerprint") == fingerprint_of(factors, adapter, digest)
    assert rpc(served, "base_digest") == digest, "the base stays"
    trainer = trainer_side([served])
    served.client.post("/pause").raise_for_status()
    served.post("/start_weight_update")
    sent = trainer.send(trainer.stream(base))
    assert rpc(served, "weight_fingerprint") == sent, "also before the adapters are gone"
    served.post("/finish_weight_update", {"weight_version": "whole"})
    served.post("/resume")
    assert rpc(served, "weight_fingerprint") == sent
    assert_serves(served, base, "whole", reference)
    trainer.die()


def update_and_model(checkpoint: Path) -> tuple[WeightUpdate, torch.nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    return WeightUpdate(model), model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return found


def info_of(update: Mapping[str, Any], **changes: Any) -> UpdateInfo:
    return UpdateInfo.model_validate({**update, **changes})


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    peft_model: Any, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    adapter, factors, base, both = peft_model
    update, model = update_and_model(tiny_model("qwen3"))
    file, digest = tmp_path / "adapters.safetensors", digest_of(base)
    save_file(dict(factors), file)
    good = update_of(factors, adapter, digest, file)
    update.start()
    update.receive(info_of(good))
    update.finish()
    assert torch.allclose(logits(model), logits(both), atol=1e-5)
    before, shown = logits(model), update.fingerprint
    update.start()
    half = {name: factor for name, factor in factors.items() if "layers.0.mlp.up_proj.lora_B" not in name}
    huge = 10**13
    shapes = [[huge if size == adapter.rank else size for size in factor.shape] for factor in factors.values()]
    head = {**factors, "base_model.model.lm_head.lora_A.weight": torch.zeros(3, 32)}
    cases: Sequence[tuple[dict[str, Any], str]] = (
        ({"adapter": {"rank": 3, "alpha": 5, "base": OTHER_DIGEST}}, "send those weights first"),
        ({"adapter": {"rank": 4, "alpha": 5, "base": digest}}, "has shape"),
        ({"adapter": {"rank": huge, "alpha": 5, "base": digest}, "shapes": shapes}, f"have rank {huge}, and no layer"),
        (update_of(half, adapter, digest), "an adapter has both"),
        (update_of(head, adapter, digest), "the model has no weight"),
        ({"snapshot": str(tmp_path / "none")}, "cannot read"),
    )
    for changes, said in cases:
        with pytest.raises(RequestRefused, match=said):
            update.receive(info_of(good, **changes))
    with pytest.raises(EngineFault, match="the old ones stay in service"):
        update.finish()
    assert update.phase is Phase.SERVING and update.fault is None
    assert torch.equal(logits(model), before) and update.fingerprint == shown


def test_what_is_wrong_in_memory_shows_in_the_fingerprint_after_it_was_put_in_service(
    peft_model: Any, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    adapter, factors, base, _ = peft_model
    file, digest = tmp_path / "adapters.safetensors", digest_of(base)
    save_file(dict(factors), file)
    expected = fingerprint_of(factors, adapter, digest)
    info = info_of(update_of(factors, adapter, digest, file))
    for fault in (None, *ALONE):
        update, _ = update_and_model(tiny_model("qwen3"))
        if fault is not None:
            AlonePlant(fault, shows=True).in_(update._adapters)
        update.start()
        update.receive(info)
        assert update.fingerprint == expected, "what was received is right"
        update.finish()
        is_in_the_base = fault == "merged and beside"
        assert (update.fingerprint == expected) == (fault is None or is_in_the_base), fault


def test_a_stream_that_breaks_leaves_the_adapters_that_were_there(
    served: Instance, peft_model: Any, tmp_path: Path, trainer_side: Any, reference: Callable[..., list[float]]
) -> None:
    adapter, factors, base, both = peft_model
    digest, file = digest_of(base), tmp_path / "adapters.safetensors"
    save_file(dict(factors), file)
    put(served, "beside", update_of(factors, adapter, digest, file))
    others = {name: factor + 1 for name, factor in factors.items()}
    trainer = trainer_side([served])
    served.client.post("/pause").raise_for_status()
    served.post("/start_weight_update")
    body = {"update_info": update_of(others, adapter, digest)}
    call = trainer.threads.submit(served.post, "/update_weights", body, 500)
    assert not trainer.group.wait_accepted(60)
    trainer.die()
    assert "what was there stays" in call.result()["error"]["message"]
    assert served.client.get("/health").status_code == 200
    served.post("/finish_weight_update", {"weight_version": "never"}, 500)
    served.post("/resume")
    assert_serves(served, both, "beside", reference)


def test_a_base_that_came_is_the_one_below_the_adapters_once_its_update_has_ended(
    peft_model: Any, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    adapter, factors, base, both = peft_model
    update, model = update_and_model(tiny_model("qwen3"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    digest = digest_of(base)
    assert update.base_digest() not in (digest, None)
    whole, alone = tmp_path / "base.safetensors", tmp_path / "adapters.safetensors"
    views = parameter_views(base)
    save_file({name: view.clone() for name, view in views.items()}, whole)
    save_file(dict(factors), alone)
    of_base = {key: value for key, value in update_of(views, adapter, digest, whole).items() if key != "adapter"}
    update.start()
    update.receive(info_of(of_base))
    assert update.base_digest() is None, "a trainer that was lost here has to send it again"
    with pytest.raises(RequestRefused, match="this instance has None"):
        update.receive(info_of(update_of(factors, adapter, digest, alone)))
    update.finish()
    assert update.base_digest() == digest
    update.start()
    update.receive(info_of(update_of(factors, adapter, digest, alone)))
    update.finish()
    assert update.base_digest() == digest and torch.allclose(logits(model), logits(both), atol=1e-5)
    update.sleep(keeps=False)
    assert update.base_digest() is None
    update.wake()
    assert update.base_digest() is None
    update.start()
    with pytest.raises(RequestRefused, match="this instance has None"):
        update.receive(info_of(update_of(factors, adapter, digest, alone)))
    update.receive(info_of(of_base))
    update.finish()
    assert torch.allclose(logits(model), logits(base), atol=1e-5), "adapters do not outlive their base"
