"""Checkpoints in and out: names, shapes, shards, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.errors import ConfigError
from async_rl.method.types import Group
from tests.support.tiny_model import FAMILIES
from trainer.hf.checkpoint import save_hf_checkpoint
from trainer.hf.weight_map import CHOICE_BIAS
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
WEIGHTS = "model.safetensors"


def copied(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a checkpoint with some keys of its config changed."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_keeps_every_bit(
    family: str, tied: bool, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    source = tiny_model(family, tied=tied)
    trainer = make_trainer(source)
    specs = trainer.export.specs
    streamed = dict(trainer.export.stream())
    original = load_file(source / WEIGHTS)
    assert [spec.name for spec in specs] == [spec.name for spec in streamed]
    assert {spec.name for spec in specs} == {name for name in original if not name.endswith(CHOICE_BIAS)}
    for spec, tensor in streamed.items():
        assert torch.equal(tensor, original[spec.name]), spec.name
        assert (spec.dtype_name, spec.shape) == ("float32", tuple(original[spec.name].shape))
    trainer.save_hf(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / WEIGHTS)
    assert set(saved) == set(original)
    assert all(torch.equal(saved[name], original[name]) for name in original)


def test_saved_checkpoint_loads_in_transformers_with_tokenizer_and_generation_config(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_model("qwen3", tied=True), dtype="bfloat16")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "old").touch()
    trainer.save_hf(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").decode([5, 6]) != ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    assert not (tmp_path / "saved" / "old").exists()


def test_sharded_checkpoint_loads_and_saves(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    source = tiny_model("llama")
    trainer = make_trainer(source)
    save_hf_checkpoint(trainer.models.policy_model, source, tmp_path / "shards", max_shard_bytes=20_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    again = make_trainer(tmp_path / "shards")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "shards").state_dict()
    for (spec, ours), (_, original) in zip(again.export.stream(), trainer.export.stream(), strict=True):
        assert torch.equal(ours, original)
        assert torch.equal(theirs[spec.name], original)


def test_everything_of_the_tokenizer_is_there_and_others_may_read_it(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    (source / "tokenizer.json").chmod(0o600)
    out = tmp_path / "out"
    save_hf_checkpoint(make_trainer(source).models.policy_model, source, out)
    found = AutoTokenizer.from_pretrained(out)
    assert found.chat_template == tokenizer.chat_template
    assert found.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    (tmp_path / "new").touch()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}


def test_llama3_rope_scaling_equals_transformers(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 50_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    source = copied(tiny_model("llama"), tmp_path / "llama3", rope_parameters=rope, max_position_embeddings=32_768)
    expected = grpo_in_transformers(source, source, ragged_groups)
    trainer = make_trainer(source)
    for group in ragged_groups:
        trainer.accumulate([[group]])
    assert trainer.optimizer_step().grad_norm == pytest.approx(
        float(torch.cat([g.flatten() for g in expected.gradients.values()]).norm()), rel=1e-5
    )


def test_unsupported_model_is_refused_by_name(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    source = copied(tiny_model("llama"), tmp_path / "changed", hidden_act="gelu")
    with pytest.raises(ConfigError, match=r"hidden_act 'gelu' in its config\.json, which the trainer does not support"):
        make_trainer(source)


def test_weights_that_do_not_fit_the_config_are_refused(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    wrong_shape = copied(tiny_model("qwen3"), tmp_path / "wrong_shape", intermediate_size=48)
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight' has shape \[64, 32\].*asks for \[48, 32\]"):
        make_trainer(wrong_shape)
    missing = copied(tiny_model("qwen3"), tmp_path / "missing", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ConfigError, match=r"has no tensor 'model\.layers\.2"):
        make_trainer(missing)
    unknown = copied(tiny_model("qwen3"), tmp_path / "unknown")
    weights = load_file(unknown / WEIGHTS)
    save_file(weights | {"model.layers.0.mlp.gate.weight": torch.zeros(2)}, unknown / WEIGHTS)
    with pytest.raises(ConfigError, match=r"mlp\.gate\.weight', which the trainer has no place for"):
        make_trainer(unknown)
    (unknown / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        make_trainer(unknown)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_weights_that_were_copied_in_part_are_bad_input(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path, share: float
) -> None:
    checkpoint = copied(tiny_model("qwen3"), tmp_path / "cut")
    whole = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged, or was copied only in part: .*; copy it"):
        make_trainer(checkpoint)
