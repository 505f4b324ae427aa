"""What the files of a checkpoint tell before anything starts; the mistakes of users are in deploy/local too."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight import find_faults, find_missing_files
from async_rl.checks.preflight.model import (
    ModelFiles,
    find_checkpoint,
    require_supported,
    require_trainable,
)
from async_rl.checks.preflight.model_room import require_fit, require_tokens, with_room
from async_rl.errors import ConfigError
from async_rl.shared.model_limits import FAMILIES
from tests.support.minimal_config import config_of
from tests.support.published_models import CONFIGS, WEIGHTS
from tests.support.tiny_model import DEEPSEEKS_EXPERTS, LATENTS

QWEN3 = CONFIGS["Qwen/Qwen3-8B"]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


KIMI = {**QWEN3, **LATENTS, **DEEPSEEKS_EXPERTS, "model_type": "kimi_k2"}
del KIMI["head_dim"]


def checkpoint(folder: Path, config: Any = None, tokenizer: Any = None, **files: str) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN3 if config is None else config))
    (folder / "tokenizer_config.json").write_text(json.dumps({} if tokenizer is None else tokenizer))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    for name, text in files.items():
        (folder / name.replace("_json", ".json").replace("_jinja", ".jinja")).write_text(text)
    return folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer_config.json"])
def test_a_directory_without_its_files_is_no_checkpoint(tmp_path: Path, missing: str) -> None:
    (checkpoint(tmp_path) / missing).unlink()
    words = "has no config.json" if missing == "config.json" else "has no tokenizer: expected tokenizer.json or"
    with pytest.raises(ConfigError, match=words):
        ModelFiles.find(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "\x00", "[" * 10**5])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_files_that_are_no_objects_are_named(tmp_path: Path, name: str, text: str) -> None:
    (checkpoint(tmp_path) / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name} (cannot be read: .*; download|holds .*, expected an object)"):
        ModelFiles.find(str(tmp_path))


@pytest.mark.parametrize("name", ["./none", "/no/such", "~/none", "a/b/c", "../none", "model"])
def test_what_is_no_name_of_the_hub_is_not_asked_of_it(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist: give a Hugging Face checkpoint directory"):
        ModelFiles.find(name)


def test_the_hub_is_asked_once_for_a_file_that_it_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def unreachable(name: str, file: str) -> str:
        asked.append((name, file))
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    for setting in ("model.path", "algorithm.options.critic_path"):
        with pytest.raises(ConfigError, match=rf"{setting} 'nobody/nothing' is neither .*: no route to the hub; give"):
            ModelFiles.find("nobody/nothing", setting)
    assert asked == [("nobody/nothing", "config.json")]


def test_a_checkpoint_is_a_directory_with_a_config_or_the_name_of_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: give a Hugging Face checkpoint directory"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert find_checkpoint(str(tmp_path)) == tmp_path
    for neither in (str(tmp_path / "missing"), "no/such/model", "owner/not-in-the-cache"):
        with pytest.raises(ConfigError, match="is neither a directory nor a model that can be fetched from the hub"):
            find_checkpoint(neither)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "", None, 3, "QWEN3"])
def test_the_trainers_families_are_trainable_and_others_named(tmp_path: Path, family: Any) -> None:
    config = {**QWEN3, **EXPERTS, **DEEPSEEKS_EXPERTS, "model_type": family}
    if family == "deepseek_v3":
        config |= {**LATENTS, "head_dim": LATENTS["qk_rope_head_dim"]}
    files = ModelFiles.find(str(checkpoint(tmp_path, config, {"chat_template": "x"})))
    if family in FAMILIES:
        require_trainable(config_of(), files)
        return
    with pytest.raises(ConfigError, match="which the trainer does not support: expected one of qwen3, "):
        require_trainable(config_of(), files)


@pytest.mark.parametrize("uses_template", [True, False])
@pytest.mark.parametrize("where", ["tokenizer_config", "chat_template_jinja", "chat_template_json", None])
def test_a_chat_template_is_found_wherever_it_is_kept(tmp_path: Path, where: str | None, uses_template: bool) -> None:
    tokenizer = {"chat_template": "x"} if where == "tokenizer_config" else {}
    extra = {where: "x"} if where and where.startswith("chat") else {}
    files = ModelFiles.find(str(checkpoint(tmp_path, tokenizer=tokenizer, **extra)))
    config = config_of(prompts={"chat_template": uses_template})
    # The last one is a processor's, which no tokenizer reads.
    if where not in (None, "chat_template_json") or not uses_template:
        require_trainable(config, files)
        return
    with pytest.raises(ConfigError, match=r"the tokenizer in model\.path .* has no chat template: set"):
        require_trainable(config, files)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x02\0\0\0\0\0\0\0[]"])
def test_weights_that_are_no_safetensors_are_named_before_a_start(tmp_path: Path, content: bytes) -> None:
    (checkpoint(tmp_path, tokenizer={"chat_template": "x"}) / "model.safetensors").write_bytes(content)
    config = config_of(model={"path": str(tmp_path)})
    (missing,) = find_missing_files(config)
    assert "cannot be read as safetensors" in str(missing)
    with pytest.raises(ConfigError, match=r"model\.safetensors' cannot be read as safetensors .* download it again"):
        require_trainable(config, ModelFiles.find(str(tmp_path)))


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        ({"added_tokens": 5}, "added_tokens of type int, expected a list"),
        ({"added_tokens": [{"id": "3"}]}, "added_tokens with the id '3', expected a number from 0"),
        ({"added_tokens": [{"content": "x"}]}, "added_tokens with the id None"),
        ({"added_tokens": [3.5]}, "added_tokens with the id 3.5"),
        ({"model": []}, "model of type list, expected an object"),
        ({"model": {"vocab": 5}}, "vocab of type int, expected an object or a list"),
        ({"model": {"vocab": {"a": 0, "b": "1"}}}, "vocab with the id '1'"),
        ({"model": {"vocab": {"a": True}}}, "vocab with the id True"),
        ({}, None),
        ({"model": {"vocab": [["a", 0.5]]}, "added_tokens": None}, None),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}, None),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_its_key(tmp_path: Path, tokenizer: Any, says: str | None) -> None:
    (checkpoint(tmp_path) / "tokenizer.json").write_text(json.dumps(tokenizer))
    files = ModelFiles.find(str(tmp_path))
    if says is None:
        require_supported(files)
        return
    with pytest.raises(ConfigError, match=rf"tokenizer\.json has {says}.*; download or save it again"):
        require_supported(files)


@pytest.mark.parametrize("positions", ["4096", 4096.0, True, 0])
def test_positions_that_are_no_number_are_not_taken_for_no_limit(tmp_path: Path, positions: Any) -> None:
    files = ModelFiles.find(str(checkpoint(tmp_path, {**QWEN3, "max_position_embeddings": positions})))
    with pytest.raises(ConfigError, match=r"has max_position_embeddings = .*: expected a number from 1"):
        require_fit(config_of(), files)


def test_a_token_cannot_use_more_experts_than_there_are(tmp_path: Path) -> None:
    config = {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "num_experts_per_tok": 9}
    with pytest.raises(ConfigError, match=r"has num_experts_per_tok = 9 .*: expected at most its 8 experts"):
        _ = ModelFiles.find(str(checkpoint(tmp_path, config))).shape


def test_weights_have_to_be_safetensors(tmp_path: Path) -> None:
    (checkpoint(tmp_path, tokenizer={"chat_template": "x"}) / "model.safetensors").rename(tmp_path / "model.bin")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors: save its weights"):
        require_trainable(config_of(), ModelFiles.find(str(tmp_path)))


def files_of(**config: Any) -> ModelFiles:
    return ModelFiles("some/model", None, config, {})


@pytest.mark.parametrize(
    ("prompt", "response", "positions", "remedy"),
    [
        (60, 40, 100, None),
        (61, 40, 100, "lower prompts.max_prompt_tokens to at most 60"),
        (1, 100, 100, "lower rollout.max_response_tokens below 100"),
        (60, 40, None, None),
    ],
)
def test_the_longest_sequence_has_to_fit_to_the_token(
    prompt: int, response: int, positions: Any, remedy: str | None
) -> None:
    config = config_of(prompts={"max_prompt_tokens": prompt}, rollout={"max_response_tokens": response})
    files = files_of(max_position_embeddings=positions)
    if remedy is None:
        require_fit(config, files)
        return
    with pytest.raises(ConfigError, match=f"of {prompt + response} tokens, more than the model's 100 .*{remedy}"):
        require_fit(config, files)


@pytest.mark.parametrize(
    ("prompt", "context", "positions", "most"),
    [(99, None, 100, None), (100, None, 100, 100), (49, 50, 100, None), (50, 50, 100, 50), (500, None, None, None)],
)
@pytest.mark.parametrize("sets", [[], [{"name": "test", "source": "test.jsonl"}]])
def test_a_program_needs_room_for_a_turn_whatever_its_turns_have_together(
    prompt: int, context: int | None, positions: int | None, most: int | None, sets: list[dict[str, str]]
) -> None:
    rollout = {"program": "command:true", "max_response_tokens": 1000, "options": {"max_context_tokens": context}}
    # Sets are answered by the program, too.
    config = config_of(prompts={"max_prompt_tokens": prompt}, rollout=rollout, evaluation={"sets": sets})
    if most is None:
        require_fit(config, files_of(max_position_embeddings=positions))
        return
    with pytest.raises(ConfigError, match=f"leaves no room for a turn: .* at most {most} tokens .* to {most - 1} at"):
        require_fit(config, files_of(max_position_embeddings=positions))


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "is_right"),
    [
        ([], 10, True),
        ([0, 9], 10, True),
        ([10], 10, False),
        ([3, 99], 10, False),
        ([-1], 10, False),
        ([99], None, True),
    ],
)
def test_stop_tokens_are_tokens_of_the_model(tokens: list[int], vocabulary: Any, is_right: bool) -> None:
    config = config_of(rollout={"stop": tokens})
    if is_right:
        require_tokens(config, files_of(vocab_size=vocabulary))
        return
    with pytest.raises(ConfigError, match=r"rollout\.stop is .*, but tokens of model\.path .* are 0 to 9"):
        require_tokens(config, files_of(vocab_size=vocabulary))


TOO_LONG = "n" * 300
"""No file system has such a name; like a directory that may not be read, it makes an OSError of every look."""


def test_a_path_that_cannot_even_be_looked_at_is_an_error_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"critic_path 'n+' cannot be read: File name too long"):
        ModelFiles.find(TOO_LONG, "algorithm.options.critic_path")
    config = config_of(model={"path": TOO_LONG}, algorithm={"teacher": TOO_LONG})
    assert find_missing_files(config) == [], "find_faults names it"
    assert any("model.path" in str(fault.error) for fault in find_faults(config, trains=True, serves=True))


@pytest.mark.parametrize(
    ("limit", "rollout", "positions", "most"),
    [
        (1024, {"max_response_tokens": 16}, 256, 240),
        (64, {"max_response_tokens": 16}, 256, 64),
        (1024, {"max_response_tokens": 255}, 256, 1),
        (1024, {"max_response_tokens": 256}, 256, 1024),  # No prompt has room: `require_fit` names the responses.
        (1024, {"max_response_tokens": 16}, None, 1024),
        (1024, {"program": "command:true", "max_response_tokens": 900}, 256, 255),
        (1024, {"program": "command:true", "options": {"max_context_tokens": 100}}, 256, 99),
    ],
)
def test_prompts_may_have_what_responses_leave_of_the_models_positions(
    limit: int, rollout: dict[str, Any], positions: int | None, most: int
) -> None:
    config = config_of(prompts={"max_prompt_tokens": limit}, rollout=rollout)
    files = files_of(max_position_embeddings=positions)
    fitted = with_room(config, files)
    assert fitted.prompts.max_prompt_tokens == most
    if most != limit:
        require_fit(fitted, files)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen3_next"])
def test_fp8_is_refused_where_instances_cannot_take_the_trainers_weights(
    tmp_path: Path, family: str, engine: str
) -> None:
    config = {**QWEN3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config |= {**EXPERTS, "model_type": family}
    if family == "deepseek_v3":
        config |= {**DEEPSEEKS_EXPERTS, **LATENTS, "head_dim": LATENTS["qk_rope_head_dim"]}
    files = ModelFiles.find(str(checkpoint(tmp_path, config, {"chat_template": "x"})))
    run = config_of(inference={"engine": engine})
    if (family, engine) == ("qwen3", "transformers"):
        require_trainable(run, files)
        return
    with pytest.raises(ConfigError, match=f"is in fp8 .* which inference.engine = '{engine}' does not serve"):
        require_trainable(run, files)


def test_a_checkpoint_that_only_its_own_code_reads_is_refused_with_what_helps(tmp_path: Path) -> None:
    """As those of Moonlight and Kimi K2: none of that code is run."""
    code = {"auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}}
    config = config_of(model={"path": str(checkpoint(tmp_path, tokenizer=code))}, prompts={"chat_template": False})
    with pytest.raises(
        ConfigError, match=r"tokenization_moonshot.*no code of a checkpoint is run: expected a tokenizer"
    ):
        require_trainable(config, ModelFiles.find(str(tmp_path)))
    files = ModelFiles("kimi", None, KIMI, {})
    with pytest.raises(
        ConfigError, match=r"model_type 'kimi_k2', a name that transformers does not know .*'deepseek_v3'"
    ):
        require_trainable(config, files)
