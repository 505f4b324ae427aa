"""Command line of `async-rl serve` (`python -m inference_service`); imports little, to report errors early."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from async_rl.config.texts import without_brackets
from async_rl.errors import ConfigError
from async_rl.shared.programs.command_line import Parser
from inference_service.engine_interface import LogprobsMode

TOKEN_VARIABLE = "ASYNC_RL_TOKEN"
"""Environment variable with the bearer token that requests must carry; unset or empty for none."""


@dataclass(frozen=True, slots=True)
class Options:
    """`max_model_len` None means the model's maximum; `served_model_name` None means `model`.

    `register` is the URL of a trainer's fleet endpoint or the directory of its run, `patience_s` how long no fleet may
    answer before the instance ends itself (None: for ever), `advertise` the URL under which the trainer reaches this
    instance (None: its own host and port), `name` its name in the fleet (None: host and port). `engine_options` are
    passed to vLLM's server unchanged.
    """

    engine: Literal["transformers", "vllm"]
    model: str
    host: str
    port: int
    device: Literal["cpu", "cuda", "npu"]
    tensor_parallel: int
    dtype: Literal["float32", "bfloat16"]
    max_concurrency: int
    max_model_len: int | None
    logprobs_mode: LogprobsMode
    exact: bool
    asleep: bool
    served_model_name: str | None
    register: str | None
    advertise: str | None
    name: str | None
    patience_s: float | None
    check: bool
    engine_options: tuple[str, ...]


def parse_options(arguments: Sequence[str]) -> Options:
    """Parses the arguments after the program's name; prints usage and exits with code 2 on a bad one."""
    parser = Parser(
        "async-rl serve",
        "Serves a model over vLLM's RL HTTP protocol. Words after `--` go to vLLM's own server.",
        "--model PATH [OPTIONS] [-- VLLM_ARGUMENTS]",
    )
    parser.keep_rest()
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint: a directory or a hub name")
    parser.add_argument("--host", type=without_brackets, default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000, help="0 picks a free one (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu", help="npu needs --engine vllm")
    parser.add_argument(
        "--tp", dest="tensor_parallel", type=_positive, default=1, help="workers of one instance; vllm only"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--max-concurrency", type=_positive, default=64, help="responses generated at once (default: %(default)s)"
    )
    parser.add_argument(
        "--max-model-len", type=_positive, default=None, help="prompt + response (default: the model's)"
    )
    parser.add_argument(
        "--logprobs-mode",
        choices=get_args(LogprobsMode),
        default="processed_logprobs",
        help="log-probs after temperature and truncation, as a trainer compares them, or of the raw model "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="compute the same bits as a trainer with train.exact, in float32 on a CPU",
    )
    parser.add_argument(
        "--asleep",
        action="store_true",
        help="begin without weights and cache on the device, until a trainer wakes it (run.placement = turns)",
    )
    parser.add_argument("--served-model-name", default=None, help="the name clients use (default: --model)")
    parser.add_argument(
        "--register",
        metavar="URL|DIR",
        default=None,
        help="join the fleet of the trainer at this URL, or of this run.dir",
    )
    parser.add_argument("--advertise", metavar="URL", default=None, help="its own URL as the trainer reaches it")
    parser.add_argument("--name", default=None, help="what the fleet calls this instance (default: host and port)")
    parser.add_argument(
        "--patience-s",
        type=_patience,
        default=None,
        help="end, with exit code 3, when no fleet has answered for so long (default: 0, wait for ever)",
    )
    parser.add_argument("--check", action="store_true", help="check the model's path and the engine, and end")
    options = Options(**vars(parser.parse_args(arguments)), engine_options=parser.rest)
    _require_possible(options, parser)
    return options


def _require_possible(options: Options, parser: Parser) -> None:
    """Ends the program with a usage error if options contradict each other."""
    if options.engine == "transformers":
        if options.tensor_parallel > 1:
            parser.error(f"--tp {options.tensor_parallel} needs --engine vllm: the transformers engine has one worker")
        if options.device == "npu":
            parser.error("--device npu needs --engine vllm (with vllm-ascend)")
        if options.engine_options:
            parser.error(f"arguments after -- are for --engine vllm: {' '.join(options.engine_options)}")
    if options.exact and (options.engine, options.device, options.dtype) != ("transformers", "cpu", "float32"):
        parser.error(
            f"--exact needs --engine transformers --device cpu --dtype float32, not {options.engine} on "
            f"{options.device} in {options.dtype}"
        )
    if options.register is None and (options.advertise or options.name or options.patience_s):
        parser.error("--advertise, --name and --patience-s are for an instance that joins a fleet: give --register too")


def require_checkpoint(model: str) -> None:
    """Refuses a path without a model; a hub name (`owner/name`) is accepted, and is resolved when it is loaded.

    Raises:
        ConfigError: there is no checkpoint at that path.
    """
    looks_local = model.startswith((".", "/", "~")) or model.count("/") != 1
    if looks_local and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"no model at {model!r}: expected a directory with config.json and safetensors weights")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: expected at least 1")
    return value


def _patience(text: str) -> float | None:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no duration: expected seconds, 0 for no limit")
    return value or None


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port: expected 0 to 65535")
    return value
