"""How vLLM's server would be started; vLLM itself is not needed."""

import json
from typing import Any

import pytest

from async_rl.errors import ConfigError
from inference_service.options import Options, parse_options
from inference_service.vllm.command import GUARD, IDENTITY, server_command
from inference_service.vllm.versions import VllmRelease

NEW = VllmRelease((0, 32))
OLD = VllmRelease((0, 23))


def options(*more: str) -> Options:
    return parse_options(["--engine", "vllm", "--model", "m", *more])


def value(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_options_of_an_instance_become_those_of_vllm() -> None:
    given = ("--tp", "4", "--dtype", "bfloat16", "--max-concurrency", "7", "--max-model-len", "99")
    argv = server_command(options(*given, "--served-model-name", "n", "--device", "cuda"), NEW, 8123, {}, "boot").argv
    expected = {
        "--model": "m",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--served-model-name": "n",
        "--tensor-parallel-size": "4",
        "--dtype": "bfloat16",
        "--max-num-seqs": "7",
        "--max-model-len": "99",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
    }
    assert {name: value(argv, name) for name in expected} == expected
    assert json.loads(value(argv, "--weight-transfer-config")) == {"backend": "async_rl"}
    assert "--enforce-eager" not in argv and "--enable-prefix-caching" in argv


def test_one_that_begins_asleep_can_sleep() -> None:
    for device, can in {"cuda": True, "npu": True, "cpu": False}.items():
        given = options("--device", device, "--asleep")
        assert ("--enable-sleep-mode" in server_command(given, NEW, 1, {}, "boot").argv) == can
    assert "--enable-sleep-mode" not in server_command(options("--device", "cuda"), NEW, 1, {}, "boot").argv


def test_the_users_arguments_come_last_so_that_they_win() -> None:
    argv = server_command(options("--", "--max-num-seqs", "3", "--swap"), NEW, 1, {}, "boot").argv
    assert argv[-3:] == ("--max-num-seqs", "3", "--swap")


def test_responses_share_short_prompts_on_cpus_too_where_vllm_has_large_blocks() -> None:
    assert value(server_command(options(), NEW, 1, {}, "boot").argv, "--block-size") == "32"
    assert "--block-size" not in server_command(options("--device", "cuda"), NEW, 1, {}, "boot").argv
    own = server_command(options("--", "--block-size", "64"), NEW, 1, {}, "boot").argv
    assert own[-2:] == ("--block-size", "64"), "the last one counts"


def test_only_a_release_with_scale_out_is_told_to_serve_it() -> None:
    assert "--enable-scale-out" in server_command(options(), NEW, 1, {}, "boot").argv
    assert "--enable-scale-out" not in server_command(options(), OLD, 1, {}, "boot").argv


@pytest.mark.parametrize(("token", "guarded"), [("s3cret", True), ("", False)])
def test_a_token_puts_the_guard_before_every_route(token: str, guarded: bool) -> None:
    command = server_command(options(), NEW, 1, {"ASYNC_RL_TOKEN": token}, "boot")
    assert (GUARD in command.argv) is guarded and command.argv.count("--middleware") == 3 + guarded
    last = max(i for i, word in enumerate(command.argv) if word == "--middleware")
    assert command.argv[last + 1] == IDENTITY, "the outermost one: its headers are on refusals too"
    assert command.env["ASYNC_RL_BOOT_ID"] == "boot" and command.env["ASYNC_RL_MAX_CONCURRENCY"] == "64"
    assert not any("s3cret" in word for word in command.argv), "the process list must not show it"


def test_the_environment_is_kept_and_completed() -> None:
    env = server_command(options(), NEW, 1, {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "9"}, "boot").env
    assert env["PATH"] == "/bin" and env["VLLM_CPU_KVCACHE_SPACE"] == "9" and env["VLLM_SERVER_DEV_MODE"] == "1"
    assert server_command(options(), NEW, 1, {}, "boot").env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_command(options("--device", "cuda"), NEW, 1, {}, "boot").env


def test_adapters_can_be_loaded_where_vllm_is_started_for_them() -> None:
    variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    assert server_command(options("--", "--enable-lora"), NEW, 1, {}, "boot").env[variable] == "1"
    assert variable not in server_command(options(), NEW, 1, {}, "boot").env


def test_a_list_of_plugins_is_given_the_transport_too() -> None:
    assert server_command(options(), NEW, 1, {"VLLM_PLUGINS": "mine"}, "boot").env["VLLM_PLUGINS"] == "mine,async_rl"
    assert "VLLM_PLUGINS" not in server_command(options(), NEW, 1, {}, "boot").env


def test_weights_of_an_npu_stay_in_a_layout_that_can_be_replaced() -> None:
    command = server_command(options("--device", "npu"), OLD, 1, {"VLLM_ASCEND_ENABLE_NZ": "1"}, "boot")
    assert command.env["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert additional_config() == {"weight_nz_mode": 0, "rl_config": {"enabled": True}}


def additional_config(*words: str, release: VllmRelease = NEW) -> Any:
    argv = server_command(options("--device", "npu", "--", *words), release, 1, {}, "boot").argv
    (number,) = [i for i, word in enumerate(argv) if word.startswith("--additional-config")]
    return json.loads(argv[number + 1])


@pytest.mark.parametrize("split", [True, False])
def test_an_npu_gets_the_users_additional_config_over_what_rl_needs(split: bool) -> None:
    """The four fields of vllm-ascend's `RlConfig`, which refuses others and passes over all unless `enabled`."""
    asked = {"enable_training_consistency": True, "enable_batch_invariant": True, "sleep_mode_extra_cleanup": False}
    text = json.dumps({"refresh": True, "rl_config": asked})
    words = ("--additional-config", text) if split else (f"--additional-config={text}",)
    expected = {"weight_nz_mode": 0, "refresh": True, "rl_config": {"enabled": True, **asked}}
    assert additional_config("--seed", "1", *words, "--enforce-eager") == expected
    off = additional_config(
        "--additional-config", '{"rl_config": {"enabled": false}, "weight_nz_mode": 1}', release=OLD
    )
    assert off == {"weight_nz_mode": 1, "rl_config": {"enabled": False}}
    argv = server_command(options("--device", "npu", "--", "--seed", "1", *words, "--eager"), NEW, 1, {}, "boot").argv
    assert argv[-3:] == ("--seed", "1", "--eager")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"--additional-config is '\{': expected a JSON object"),
        ('{"rl_config": true}', "expected a JSON object"),
        ('{"rl_config": {"enable_batch_invariant": true}}', r"rl_config\.enable_batch_invariant, .* 0\.23 passes over"),
    ],
)
def test_an_additional_config_without_effect_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        additional_config("--additional-config", text, release=OLD)
