"""Checkpoints whose files do not belong together, or are damaged: `check` and the trainer refuse them by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.checks.preflight.model import ModelFiles, require_supported
from async_rl.errors import ConfigError
from tests.support.stored_weights import FP8, MXFP4, copied, in_fp8, in_mxfp4
from tests.support.tiny_model import FAMILIES
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
Tensors = dict[str, torch.Tensor]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"


def in_shards(path: Path) -> None:
    """The same tensors in two files and their index; the second has the norm."""
    tensors = load_file(path / SINGLE)
    places = {name: SHARDS[name == NORM] for name in tensors}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, path / shard, {"format": "pt"})
    (path / SINGLE).unlink()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def places(path: Path, **changed: str | None) -> None:
    """Changes the files where an index has tensors; None takes one out."""
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= changed
    (path / INDEX).write_text(json.dumps(index))


def change(path: Path, changed: Callable[[Tensors], Tensors], file: str = SINGLE) -> None:
    """Replaces the tensors of a file."""
    save_file({name: tensor.contiguous() for name, tensor in changed(load_file(path / file)).items()}, path / file)


def configure(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def quantize(path: Path, family: str) -> None:
    made, quantized = (in_mxfp4, MXFP4) if family == "gpt_oss" else (in_fp8, FP8)
    change(path, lambda tensors: made(tensors)[0])
    configure(path, quantization_config=quantized)


def with_predictor(tensors: Tensors) -> Tensors:
    """Behind two layers one for multi-token prediction, as DeepSeek-V3 has it: as the others, and parts of its own."""
    layer = {name.replace("layers.1.", "layers.2."): t.clone() for name, t in tensors.items() if "layers.1." in name}
    own = {f"model.layers.2.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm")}
    return {**tensors, **layer, **own, "model.layers.2.eh_proj.weight": torch.ones(32, 64)}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def renewed(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: new(tensors[name])}


Do = Callable[[Path], object]
ONE = {"x": torch.ones(1)}
UNREAD = rf"{INDEX}' cannot be read as an index: expected a weight_map"
SHARDED: dict[str, tuple[Do, str]] = {
    "both forms": (lambda path: save_file(ONE, path / SINGLE), f"has both {SINGLE} and {INDEX}, .*: remove the one"),
    "an empty index": (lambda path: (path / INDEX).write_text("{}"), UNREAD),
    "an index that is cut": (lambda path: (path / INDEX).write_text('{"weight_map": {"a'), UNREAD),
    "an index of no files": (lambda path: (path / INDEX).write_text('{"weight_map": {}}'), UNREAD),
    "an index of other types": (lambda path: places(path, **{NORM: None}), UNREAD),
    "a shard missing": (lambda path: (path / SHARDS[1]).unlink(), f"has no {SHARDS[1]}, which its {INDEX} names"),
    "a tensor in another file": (
        lambda path: places(path, **{NORM: SHARDS[0]}),
        rf"has no '{NORM}' in {SHARDS[0]}, where its {INDEX} has it",
    ),
    "a tensor in both files": (
        lambda path: change(path, lambda tensors: {**tensors, NORM: torch.ones(32)}, SHARDS[0]),
        f"has '{NORM}' in {SHARDS[0]} and in {SHARDS[1]}",
    ),
    "shards without an index": (
        lambda path: (path / INDEX).unlink(),
        f"has {SHARDS[0]}, but neither {SINGLE} nor {INDEX}, .*: download it again",
    ),
}
"""What happens to a checkpoint in shards, and what is said of it."""

WHOLE: dict[str, tuple[Do, str]] = {
    "no weights": (lambda path: (path / SINGLE).unlink(), r"has no \*\.safetensors: save its weights"),
    "no tensors": (lambda path: save_file({}, path / SINGLE), f"has no tensors in its {SINGLE}"),
    "more bytes": (
        lambda path: (path / SINGLE).write_bytes((path / SINGLE).read_bytes() + b"0"),
        rf"{SINGLE}' cannot be read as safetensors .*: download it again",
    ),
    **{
        f"no {name}": (
            lambda path, name=name: change(path, without(name)),
            rf"has no (tensor ')?{name}('|, though its config\.json has tie_word_embeddings = false)",
        )
        for name in ("lm_head.weight", "model.embed_tokens.weight", NORM, UP, "model.layers.0.input_layernorm.weight")
    },
    "no layer in the middle": (
        lambda path: change(path, lambda tensors: {n: t for n, t in tensors.items() if "layers.0." not in n}),
        r"has no tensor 'model\.layers\.0\.",
    ),
    "fp8 that config.json does not say": (
        lambda path: change(path, lambda tensors: in_fp8(tensors)[0]),
        r"_proj\.weight' in F8_E4M3, but no quantization_config of fp8",
    ),
    "whole numbers": (
        lambda path: change(path, renewed(UP, lambda up: up.to(torch.int8))),
        rf"'{UP}' in I8, which the trainer does not read: expected one of BF16",
    ),
    "fp8 of another kind": (
        lambda path: change(path, renewed(UP, lambda up: up.to(torch.float8_e5m2))),
        rf"'{UP}' in F8_E5M2, which the trainer does not read",
    ),
}

QUANTIZED: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "no scales": ("qwen3", without(UP + "_scale_inv"), rf"'{UP}' in F8_E4M3, but not its scales, '{UP}_scale_inv'"),
    "scales without values": ("qwen3", without(UP), rf"'{UP}_scale_inv', which are scales, but no values"),
    "scales of values that are not in fp8": (
        "qwen3",
        renewed(UP, lambda up: up.bfloat16()),
        rf"'{UP}_scale_inv', which are scales, but BF16 values",
    ),
    "too few scales": (
        "qwen3",
        renewed(UP + "_scale_inv", lambda scales: scales[:, :-1]),
        rf"'{UP}_scale_inv' of shape \[4, 3\]: expected \[4, 4\], a scale for each block of \[16, 8\]",
    ),
    "too many scales": (
        "qwen3",
        renewed(UP + "_scale_inv", lambda scales: scales.repeat(2, 1)),
        rf"'{UP}_scale_inv' of shape \[8, 4\]: expected \[4, 4\]",
    ),
    "fp8 that has no columns": (
        "qwen3",
        renewed(NORM, lambda norm: norm.to(torch.float8_e4m3fn)),
        rf"'{NORM}' of shape \[32\] in F8_E4M3: expected rows and columns",
    ),
    "blocks without scales": (
        "gpt_oss",
        without(EXPERTS + "_scales"),
        f"'{EXPERTS}_blocks', but no '{EXPERTS}_scales'",
    ),
    "scales without blocks": (
        "gpt_oss",
        without(EXPERTS + "_blocks"),
        f"'{EXPERTS}_scales', but no '{EXPERTS}_blocks'",
    ),
    "too few groups": (
        "gpt_oss",
        renewed(EXPERTS + "_scales", lambda scales: scales[:, :, :1]),
        rf"'{EXPERTS}_blocks' of shape \[4, 32, 2, 16\] and scales of \[4, 32, 1\]: expected",
    ),
    "blocks of numbers": (
        "gpt_oss",
        renewed(EXPERTS + "_blocks", lambda blocks: blocks.float()),
        f"'{EXPERTS}_blocks' in F32 and scales in U8: expected U8",
    ),
}


def assert_refused(path: Path, make_trainer: MakeTrainer, says: str) -> None:
    """By `check`, and by the trainer without it."""
    with pytest.raises(ConfigError, match=says):
        require_supported(ModelFiles.find(str(path)))
    with pytest.raises(ConfigError, match=says):
        make_trainer(path)


@pytest.mark.parametrize("name", [*SHARDED, *WHOLE])
def test_files_that_do_not_belong_together_are_refused_by_name(
    name: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    path = copied(tiny_model("qwen3"), tmp_path / "model")
    if name in SHARDED:
        in_shards(path)
        require_supported(ModelFiles.find(str(path)))
    do, says = SHARDED.get(name) or WHOLE[name]
    do(path)
    assert_refused(path, make_trainer, says)


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_and_scales_that_do_not_belong_together_are_refused_by_name(
    name: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    family, changed, says = QUANTIZED[name]
    path = copied(tiny_model(family), tmp_path / "model")
    quantize(path, family)
    require_supported(ModelFiles.find(str(path)))
    change(path, changed)
    assert_refused(path, make_trainer, says)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_layer_that_is_not_for_multi_token_prediction_counts_whatever_its_number(
    family: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    path = copied(tiny_model(family), tmp_path / "model", num_nextn_predict_layers=1)
    change(path, with_predictor)
    require_supported(ModelFiles.find(str(path)))
    make_trainer(path)
    change(path, without(*(f"model.layers.2.{name}.weight" for name in ("enorm", "hnorm", "eh_proj"))))
    with pytest.raises(ConfigError, match=r"has num_hidden_layers = 2 in its config\.json and 3 layers in its"):
        require_supported(ModelFiles.find(str(path)))
    with pytest.raises(ConfigError, match=r"has the tensor 'model\.layers\.2\..*', which the trainer has no place for"):
        make_trainer(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_checkpoints_of_every_family_pass_in_one_file_in_shards_and_quantized(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = copied(tiny_model(family), tmp_path / "model")
    require_supported(ModelFiles.find(str(path)))
    in_shards(path)
    # What other programs have beside them does not count.
    save_file(ONE, path / "consolidated.safetensors")
    require_supported(ModelFiles.find(str(path)))
    quantized = copied(tiny_model(family), tmp_path / "quantized")
    quantize(quantized, family)
    require_supported(ModelFiles.find(str(quantized)))
