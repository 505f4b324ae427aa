"""`async-rl export`: the policy of a checkpoint as transformers loads it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from async_rl.checks.preflight.model import read_shape
from async_rl.checks.preflight.weight_files import stored_tensors, weights_sample
from async_rl.config.file import parse_config
from async_rl.errors import ConfigError, WriteFailed
from async_rl.method.types import Group
from tests.support.full_disk import largest_file
from tests.support.minimal_config import minimal_tree
from tests.support.trainer.checkpoint_worker import Run
from trainer import export
from trainer.checkpoint.files import checkpoint_path, read_manifest, seal
from trainer.checkpoint.policy_export import export_merged, export_policy
from trainer.export import choose_checkpoint, require_empty
from trainer.forward_backward import make_passes
from trainer.hf.adapters import weights_digest
from trainer.parallel import Parallel
from trainer.prompt_data import contents_of
from trainer.trainer import MegatronTrainer


@pytest.fixture
def make_run(tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path) -> Callable[..., MegatronTrainer]:
    """Trains two steps in the run directory `tmp_path / "run"`, with a checkpoint after each."""

    def make(family: str = "qwen3", **sections: dict[str, Any]) -> MegatronTrainer:
        directory = str(tmp_path / "run" / "checkpoints")
        return Run(str(tiny_model(family)), directory, 2, (1, 2), sections)(parallel)

    return make


def test_transformers_gives_the_log_probs_of_the_policy(
    make_run: Callable[..., MegatronTrainer],
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    trainer = make_run()
    export_policy(checkpoint_path(tmp_path / "run/checkpoints", 2), tmp_path / "out", parallel)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    group = ragged_groups[0]
    with torch.no_grad():
        (ours_N,) = make_passes([[group]], parallel, 1.0, 8192)[0].logprobs(trainer.models.policy_model)
        theirs = []
        for response in group.responses:
            tokens = torch.tensor([[*group.prompt.token_ids, *response.token_ids]])
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            theirs.append(logprobs[len(group.prompt.token_ids) - 1 :])
    torch.testing.assert_close(ours_N, torch.cat(theirs), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("ab") == AutoTokenizer.from_pretrained(
        tiny_model("qwen3")
    ).encode("ab")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 1


def test_a_bfloat16_policy_is_written_as_it_was_trained(
    make_run: Callable[..., MegatronTrainer], parallel: Parallel, tmp_path: Path
) -> None:
    trainer = make_run("qwen2", model={"dtype": "bfloat16"})
    export_policy(checkpoint_path(tmp_path / "run/checkpoints", 2), tmp_path / "out", parallel)
    written = load_file(tmp_path / "out/model.safetensors")
    for spec, tensor in trainer.export.stream():
        assert torch.equal(written[spec.name], tensor), spec.name


@pytest.mark.distributed
def test_the_command_exports_the_newest_checkpoint_or_the_one_asked_for(
    make_run: Callable[..., MegatronTrainer], parallel: Parallel, tmp_path: Path
) -> None:
    make_run()
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "trainer.export", run_dir, "--to", tmp_path / "out"]
    subprocess.run(command, check=True)
    export_policy(choose_checkpoint(run_dir, 2), tmp_path / "second", parallel)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "second/model.safetensors").read_bytes()
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# out\n" in card
    assert "after 2 iterations (2 optimizer steps)" in card and "so nothing is claimed" in card
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2
    assert "is not an empty directory: name a new one" in again.stderr
    assert choose_checkpoint(run_dir, None) == checkpoint_path(run_dir / "checkpoints", 2)
    assert choose_checkpoint(run_dir, 1) == checkpoint_path(run_dir / "checkpoints", 1)
    assert choose_checkpoint(run_dir / "checkpoints/iteration-000001", None) == choose_checkpoint(run_dir, 1)
    with pytest.raises(ConfigError, match="no checkpoint iteration-000007: there are iteration-000001, iteration-00"):
        choose_checkpoint(run_dir, 7)


def test_what_cannot_be_exported_is_named(
    make_run: Callable[..., MegatronTrainer], parallel: Parallel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"has no checkpoint: expected the run\.dir of a run that saves them"):
        choose_checkpoint(tmp_path, None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file' exists and is not an empty directory"):
        require_empty(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        choose_checkpoint(Path("n" * 300), None)
    with pytest.raises(ConfigError, match="cannot be used: File name too long"):
        require_empty(Path("n" * 300))
    make_run()
    with pytest.raises(ConfigError, match=r"^--model '\.\./moved' is neither a directory nor"):
        export_policy(choose_checkpoint(tmp_path / "run", 2), tmp_path / "out", parallel, "../moved")
    damaged = choose_checkpoint(tmp_path / "run", 2)
    (damaged / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"__0_0\.distcp has 0 bytes.*the one before it is iteration-000001"):
        export_policy(damaged, tmp_path / "out", parallel)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_the_run_removes_meanwhile_is_replaced_by_its_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, to = str(tmp_path / "run"), ["--to", str(tmp_path / "out")]
    checkpoints, chosen = tmp_path / "run" / "checkpoints", list[str]()
    first, second = (checkpoints / f"iteration-00000{number}" for number in (2, 9))
    first.mkdir(parents=True)
    (first / "manifest.json").touch()

    def removed_at_first(checkpoint: Path, *arguments: Any, **options: Any) -> None:
        chosen.append(checkpoint.name)
        if len(chosen) == 1:
            checkpoint.rename(second)
            raise FileNotFoundError(checkpoint / ".metadata")

    monkeypatch.setattr(export, "run", removed_at_first)
    assert export.main([run, *to]) == 0
    assert chosen == [first.name, second.name]
    for named in ([str(first), *to], [run, "--iteration", "2", *to]):
        chosen.clear()
        second.rename(first)
        assert export.main(named) == 2 and chosen == [first.name]
        assert "iteration-000002' was removed while it was read: the run goes on" in caplog.text
        caplog.clear()
    assert export.main([run, "--iteration", "-1", *to]) == 2 and "--iteration is -1: expected" in caplog.text


def test_weights_with_another_config_are_another_model(
    make_run: Callable[..., MegatronTrainer], parallel: Parallel, tmp_path: Path
) -> None:
    make_run()
    checkpoint = choose_checkpoint(tmp_path / "run", None)
    model = Path(read_manifest(checkpoint)["config"]["model"]["path"])
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    parameters = {**config["rope_parameters"], "rope_theta": 3e4}
    (other / "config.json").write_text(json.dumps({**config, "rope_parameters": parameters}))
    content = read_manifest(checkpoint)
    content["contents"] = {"shape": read_shape(model).as_json()}
    seal_again(checkpoint, content)
    with pytest.raises(ConfigError, match=r"the model's rope_theta is 30000\.0, but was 10000\.0 .*--model"):
        export_policy(checkpoint, tmp_path / "out", parallel, str(other))
    export_policy(checkpoint, tmp_path / "out", parallel)


@pytest.mark.parametrize("cause", ["a file in the way", "a full disk"])
def test_what_cannot_be_written_is_named_and_leaves_nothing(
    cause: str, tmp_path: Path, make_run: Callable[..., MegatronTrainer], parallel: Parallel
) -> None:
    make_run()
    place = tmp_path / "place"
    place.touch() if cause == "a file in the way" else place.mkdir()
    with largest_file(8192 if cause == "a full disk" else 2**30), pytest.raises(WriteFailed, match="cannot write"):
        export_policy(choose_checkpoint(tmp_path / "run", None), place / "out", parallel)
    assert place.is_file() or not list(place.iterdir())


def test_adapters_are_written_as_peft_loads_them_or_merged(
    make_run: Callable[..., MegatronTrainer],
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    trainer = make_run(adapter={"rank": 3, "publish": "merged"})
    checkpoint = checkpoint_path(tmp_path / "run/checkpoints", 2)
    export_policy(checkpoint, tmp_path / "out", parallel)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    export_policy(checkpoint, tmp_path / "merged", parallel, merges=True)
    written = load_file(tmp_path / "merged/model.safetensors")
    for spec, tensor in trainer.export.stream():
        assert torch.equal(written[spec.name], tensor), spec.name
    group = ragged_groups[0]
    tokens = torch.tensor([[*group.prompt.token_ids, *group.responses[0].token_ids]])
    models = (
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    )
    with torch.no_grad():
        adapted, merged = (model(tokens).logits for model in models)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    # Steps as large as these change what it says.
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"))(tokens).logits
    assert float((merged - base).abs().max()) > 1e-2


def test_adapters_that_peft_saved_are_merged_as_those_of_a_run(
    make_run: Callable[..., MegatronTrainer], tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    make_run(adapter={"rank": 3, "targets": ["q_proj", "down_proj"]})
    checkpoint = checkpoint_path(tmp_path / "run/checkpoints", 2)
    export_policy(checkpoint, tmp_path / "out", parallel)
    export_policy(checkpoint, tmp_path / "merged", parallel, merges=True)
    export_merged(tmp_path / "out", tmp_path / "again", parallel, None, None)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items()) and ours.keys() == theirs.keys()
    assert AutoTokenizer.from_pretrained(tmp_path / "again").encode("ab")
    export_merged(tmp_path / "out", tmp_path / "narrow", parallel, str(tiny_model("qwen3")), "bfloat16")
    for name, tensor in load_file(tmp_path / "narrow/model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), ours[name], rtol=2**-7, atol=2**-9)


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, r"out' has peft_type = 'LOHA': only 'LORA' is held"),
    ({"r": None}, r"out' has no r, the rank, in its adapter_config\.json"),
    ({"r": 5}, r"of shape \[3, 64\] .* adapter\.rank = 5 needs \[5, 64\]"),
    ({"lora_alpha": "8"}, r'has lora_alpha = "8" in its adapter_config.json: expected a number'),
    (
        {"target_modules": ["lm_head"]},
        r"has target_modules = \['lm_head'\], which is not held: Input should be 'all",
    ),
    ({"target_modules": "q.*"}, r"has target_modules = 'q\.\*', which is not held"),
    ({"target_modules": ["up_proj"]}, r"has no '.*layers\.0\.mlp\.up_proj\.lora_A\.weight'"),
    ({"target_modules": ["model.layers.0.mlp.up_proj"]}, r"without 'model\.layers\.1\.mlp\.up_proj': peft would leave"),
    ({"use_dora": True}, r"has use_dora = True: only False is held"),
    ({"base_model_name_or_path": None}, r"out' does not say its base .*: name it by --model"),
    ({"base_model_name_or_path": "gone/../away/x"}, r"away/x' does not exist|say where it is now: --model"),
]
"""(What another adapter_config.json has, what is said of it.)"""


def test_saved_adapters_that_cannot_be_merged_are_named(
    make_run: Callable[..., MegatronTrainer], parallel: Parallel, tmp_path: Path
) -> None:
    make_run(adapter={"rank": 3, "targets": ["q_proj", "down_proj"]})
    export_policy(checkpoint_path(tmp_path / "run/checkpoints", 2), tmp_path / "out", parallel)
    config = tmp_path / "out/adapter_config.json"
    saved = json.loads(config.read_text())
    for changes, words in UNFIT:
        config.write_text(json.dumps({**saved, **changes}))
        with pytest.raises(ConfigError, match=words):
            export_merged(tmp_path / "out", tmp_path / "merged", parallel, None, None)
        assert not (tmp_path / "merged").exists()


def test_the_digest_of_a_base_is_that_of_its_tensors_in_whatever_files(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model("qwen3")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "again").mkdir()
    save_file(load_file(base / "model.safetensors"), tmp_path / "again/model.safetensors", {"made": "again"})
    (tmp_path / "again/consolidated.safetensors").write_bytes(b"no weights of this model")
    assert {weights_digest(tmp_path / name) for name in ("shards", "again")} == {weights_digest(base)}
    assert weights_digest(tiny_model("qwen3", seed=1)) != weights_digest(base)


def test_adapters_beside_other_weights_than_those_they_were_trained_beside_are_refused(
    make_run: Callable[..., MegatronTrainer], tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    make_run(adapter={"rank": 3})
    checkpoint = checkpoint_path(tmp_path / "run/checkpoints", 2)
    content = read_manifest(checkpoint)
    digest = weights_digest(tiny_model("qwen3"))
    seal_again(checkpoint, {**content, "contents": {"prompts": {}, "reward": "", "base": digest}})
    export_policy(checkpoint, tmp_path / "out", parallel)
    other = tiny_model("qwen3", seed=1)
    with pytest.raises(ConfigError, match=f"have the digest .*, but had {digest}: name that model by --model"):
        export_policy(checkpoint, tmp_path / "other", parallel, str(other))
    sample = weights_sample(tiny_model("qwen3"))
    with pytest.raises(ConfigError, match=f"beginnings have the digest {sample}, .* have {weights_sample(other)}"):
        export_merged(tmp_path / "out", tmp_path / "other", parallel, str(other), None)
    # One whose tensors begin alike.
    other = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "edited"))
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(stored_tensors(other)["model.embed_tokens.weight"].end - 4)
        file.write(b"edit")
    assert weights_sample(other) == sample
    words = (
        rf"out' were trained beside weights with the digest {digest}, and those of {{}} have {weights_digest(other)}"
    )
    with pytest.raises(ConfigError, match=words.format("the base '.*'")):
        export_merged(tmp_path / "out", tmp_path / "other", parallel, str(other), None)
    # A run that starts from them.
    tree = {**minimal_tree(), "adapter": {"rank": 3, "path": str(tmp_path / "out")}, "model": {"path": str(other)}}
    with pytest.raises(ConfigError, match=words.format(r"model\.path '.*'")):
        contents_of(parse_config(tree, "here"), {"digests": {}}, "")
    tree["model"] = {"path": str(tiny_model("qwen3"))}
    assert contents_of(parse_config(tree, "here"), {"digests": {}}, "").base == digest


def seal_again(checkpoint: Path, content: dict[str, Any]) -> None:
    """With another manifest."""
    partial = checkpoint.with_name("partial")
    checkpoint.rename(partial)
    seal(partial, checkpoint, content)
