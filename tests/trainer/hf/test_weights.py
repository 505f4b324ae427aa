"""Checkpoints in and out: names, shapes, shards, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.checks.preflight.model import ModelFiles, require_supported
from async_rl.errors import ConfigError
from async_rl.method.types import Group
from inference_service.engine.model import load_model
from tests.support.stored_weights import BLOCK, FP8, MXFP4, copied, in_fp8, in_mxfp4
from tests.support.tiny_model import FAMILIES
from trainer.hf.checkpoint import save_hf_checkpoint
from trainer.hf.mxfp4 import with_mxfp4
from trainer.hf.weight_map import Layout, weight_map
from trainer.hf.weights import read_part
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
WEIGHTS = "model.safetensors"


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
    assert {spec.name for spec in specs} == {name for name in original if not name.endswith("e_score_correction_bias")}
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
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        make_trainer(unknown)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_weights_that_were_copied_in_part_are_bad_input(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path, share: float
) -> None:
    checkpoint = copied(tiny_model("qwen3"), tmp_path / "cut")
    whole = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"model\.safetensors' cannot be read as safetensors .*: download it again"):
        make_trainer(checkpoint)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "minimax_m2"])
def test_fp8_is_read_by_blocks_and_layers_for_multi_token_prediction_are_left_out(
    family: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    source = copied(tiny_model(family), tmp_path / "fp8", quantization_config=FP8)
    stored, meant = in_fp8(load_file(source / WEIGHTS))
    predictor = {"model.layers.2.eh_proj.weight": torch.zeros(2)} if family == "deepseek_v3" else {}
    save_file(stored | predictor, source / WEIGHTS, {"format": "pt"})
    require_supported(ModelFiles.find(str(source)))
    trainer = make_trainer(source)
    for spec, tensor in trainer.export.stream():
        assert torch.equal(tensor, meant[spec.name]), spec.name
    for entry in weight_map(trainer.export.shape, Layout(tp_size=4)):
        with safe_open(source / WEIGHTS, framework="pt") as file:
            files = dict.fromkeys(file.keys(), file)
            for rank in range(4):
                for name, shard in zip(entry.hf_shapes, entry.shards(rank, 4), strict=True):
                    (at,) = shard.slices
                    assert torch.equal(read_part(files, name, BLOCK, at), meant[name][at]), name
    trainer.save_hf(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    if family != "deepseek_v3":  # transformers has no scales of a block that is not whole, which DeepSeek-V3's have
        theirs = load_model(str(source), torch.device("cpu"), torch.float32).model
        tokens = torch.arange(3, 33)[None]
        torch.testing.assert_close(saved(tokens).logits, theirs(tokens).logits)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config and not config.get("num_nextn_predict_layers")


def test_mxfp4_is_read_as_transformers_dequantizes_it(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    source = copied(tiny_model("gpt_oss"), tmp_path / "mxfp4", quantization_config=MXFP4)
    stored, meant = in_mxfp4(load_file(source / WEIGHTS))
    assert len(stored) == len(meant) + 4
    save_file(stored, source / WEIGHTS, {"format": "pt"})
    require_supported(ModelFiles.find(str(source)))
    trainer = make_trainer(source)
    for spec, tensor in trainer.export.stream():
        assert torch.equal(tensor, meant[spec.name]), spec.name
    with safe_open(source / WEIGHTS, framework="pt") as file:
        files = with_mxfp4(dict.fromkeys(file.keys(), file))
        for entry in (entry for entry in weight_map(trainer.export.shape) if entry.has_experts):
            (name,) = entry.hf_shapes
            for rank in range(4):
                (at,) = entry.shards(rank, 4)[0].slices
                assert torch.equal(read_part(files, name, None, at).float(), meant[name][at]), name
    make_trainer(source, dtype="bfloat16").save_hf(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / WEIGHTS)
    assert set(saved) == set(meant)
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, meant[name].bfloat16()), name
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    theirs = load_model(str(source), torch.device("cpu"), torch.bfloat16).model
    assert all(torch.equal(weight, saved[name]) for name, weight in theirs.named_parameters())


def test_layers_that_are_not_for_multi_token_prediction_are_not_left_out(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    source = copied(tiny_model("deepseek_v3"), tmp_path / "more")
    save_file(load_file(source / WEIGHTS) | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, source / WEIGHTS)
    with pytest.raises(ConfigError, match=r"num_hidden_layers = 2 in its config.json and 4 layers in its safetensors"):
        require_supported(ModelFiles.find(str(source)))
    with pytest.raises(ConfigError, match=r"layers\.3\.eh_proj\.weight', which the trainer has no place for"):
        make_trainer(source)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "glm4_moe"])
def test_experts_in_one_tensor_of_a_layer_are_read_one_by_one(
    family: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """As transformers saves them without the original names, which the text of a model with images needs."""
    source = tiny_model(family)
    stacked = Path(shutil.copytree(source, tmp_path / "stacked"))
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(stacked, save_original_format=False)
    names = load_file(stacked / WEIGHTS).keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names) and not any(
        ".0.up_proj" in n for n in names
    )
    require_supported(ModelFiles.find(str(stacked)))
    whole = load_file(source / WEIGHTS)
    for spec, tensor in make_trainer(stacked).export.stream():
        assert torch.equal(tensor, whole[spec.name]), spec.name
