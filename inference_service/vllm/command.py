"""From the options to the command line and environment of vLLM's own server: pure functions, tested without vLLM."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from inference_service.identity import BOOT_ID_VARIABLE, MAX_CONCURRENCY_VARIABLE
from inference_service.options import TOKEN_VARIABLE, Options
from inference_service.vllm.versions import ENABLE_LORA, VllmRelease

BACKEND = "async_rl"
"""Name of async-rl's transport in vLLM's `--weight-transfer-config`; see `plugin.py`."""

PLUGIN = "async_rl"
"""Name of that plugin's entry point."""

# The `vllm` script looks for a distribution of that name, which the CPU build is not.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
WORKER_EXTENSION = "inference_service.vllm.worker.WorkerExtension"
GUARD = "inference_service.vllm.guard.TokenGuard"
TERM_GUARD = "inference_service.term_guard.TermGuard"
SEQUENCE = "inference_service.sequence.Sequence"
IDENTITY = "inference_service.identity.IdentityFromEnvironment"

ADDITIONAL_CONFIG = "--additional-config"
ASCEND_CONFIG: dict[str, Any] = {"weight_nz_mode": 0, "rl_config": {"enabled": True}}
"""vllm-ascend's settings for RL: no NZ layout, the development routes, no expandable segments, which its sleep mode
cannot use. Releases up to 0.26 pass over `rl_config` (`vllm_ascend/ascend_config.py`, class RlConfig)."""
LAST_WITHOUT_RL_CONFIG = (0, 26)


@dataclass(frozen=True, slots=True)
class Command:
    """The command line, and its whole environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def server_command(
    options: Options, release: VllmRelease, port: int, environment: Mapping[str, str], boot_id: str
) -> Command:
    """The command that starts vLLM's server at `port`, in this process's `environment`; responses carry `boot_id`.

    `options.engine_options` come last, so they take precedence. With a token in the environment every route except
    health and metrics requires it, including the control routes, which vLLM's own `--api-key` leaves open.
    """
    values = {
        "--model": options.model,
        "--host": options.host,
        "--port": str(port),
        "--served-model-name": options.served_model_name or options.model,
        "--dtype": options.dtype,
        "--tensor-parallel-size": str(options.tensor_parallel),
        "--max-num-seqs": str(options.max_concurrency),
        "--logprobs-mode": options.logprobs_mode,
        # Sampling parameters come from the request, not from the model's generation_config.json.
        "--generation-config": "vllm",
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
        "--worker-extension-cls": WORKER_EXTENSION,
    }
    if options.device == "cpu":
        # Only whole blocks are shared by the responses of a prompt. vLLM's default on CPUs is 128 tokens; it accepts
        # multiples of 32 (`v1/attention/backends/cpu_attn.py`).
        values["--block-size"] = "32"
    if options.max_model_len is not None:
        values["--max-model-len"] = str(options.max_model_len)
    engine_options: Sequence[str] = options.engine_options
    if options.device == "npu":
        config, engine_options = _ascend_config(engine_options, release)
        values[ADDITIONAL_CONFIG] = json.dumps(config)
    # A trainer queries health every second, which the access log would record.
    flags = ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
    # Later ones are further out: whoever has no token must not fence the trainer.
    flags += ["--middleware", TERM_GUARD, "--middleware", SEQUENCE]
    if environment.get(TOKEN_VARIABLE):
        flags += ["--middleware", GUARD]
    # The outermost, so that refusals carry the headers too.
    flags += ["--middleware", IDENTITY]
    if release.has_scale_out:
        flags.append("--enable-scale-out")
    if options.device == "cpu":
        flags.append("--enforce-eager")
    elif options.asleep:
        flags.append("--enable-sleep-mode")
    words = [word for pair in values.items() for word in pair]
    argv = (sys.executable, "-m", SERVER_MODULE, *words, *flags, *engine_options)
    identity = {BOOT_ID_VARIABLE: boot_id, MAX_CONCURRENCY_VARIABLE: str(options.max_concurrency)}
    return Command(argv, _defaults(options) | dict(environment) | _necessary(options, environment) | identity)


def _ascend_config(engine_options: Sequence[str], release: VllmRelease) -> tuple[dict[str, Any], list[str]]:
    """vllm-ascend's additional config, with the user's values over ours, and the user's other options.

    `enable_training_consistency` and `enable_batch_invariant` of `rl_config` stay the user's choice: the one needs the
    package flash_attn_npu_v3, the other a vllm-ascend that was built for it.

    Raises:
        ConfigError: the user's is no JSON object, or sets an `rl_config` that this release would pass over.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(ADDITIONAL_CONFIG, default="{}")
    found, others = parser.parse_known_args(engine_options)
    try:
        own = json.loads(found.additional_config)
        asked = own.get("rl_config", {}).keys() - {"enabled"}
    except (ValueError, AttributeError):
        raise ConfigError(
            f"{ADDITIONAL_CONFIG} is {found.additional_config!r}: expected a JSON object, and one for rl_config in it"
        ) from None
    if asked and release.number <= LAST_WITHOUT_RL_CONFIG:
        raise ConfigError(
            f"{ADDITIONAL_CONFIG} sets rl_config.{min(asked)}, which vllm-ascend {release} passes over: install a "
            "newer release, or leave rl_config out"
        )
    return ASCEND_CONFIG | own | {"rl_config": ASCEND_CONFIG["rl_config"] | own.get("rl_config", {})}, others


def _defaults(options: Options) -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1"}
    if options.device == "cpu":
        # GiB; without it vLLM takes half of the machine's memory. Launchers of several instances pin them to cores, so
        # vLLM must not choose other cores. Despite --enforce-eager vLLM compiles parts of its sampler, at the first
        # request, which then takes nine seconds.
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return env


def _necessary(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    # vLLM serves the RL routes in development mode only.
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    if ENABLE_LORA in options.engine_options:
        # And those that load an adapter only with this.
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if "VLLM_PLUGINS" in environment:
        # A list of the plugins to load; without the variable vLLM loads all.
        env["VLLM_PLUGINS"] = f"{environment['VLLM_PLUGINS']},{PLUGIN}"
    if options.device == "npu":
        # Weights in the NZ layout cannot be replaced; vllm-ascend reads this variable, not its equivalent setting.
        env["VLLM_ASCEND_ENABLE_NZ"] = "0"
    return env
