"""Command line of `python -m inference_service`; imports nothing heavy, so that mistakes show at once."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from async_rl.errors import ConfigError
from inference_service.engine import LogprobsMode


@dataclass(frozen=True, slots=True)
class Options:
    """`max_model_len` None means the model's own; `served_model_name` None means `model`."""

    engine: Literal["transformers"]
    model: str
    host: str
    port: int
    device: str
    dtype: Literal["float32", "bfloat16"]
    max_concurrency: int
    max_model_len: int | None
    logprobs_mode: LogprobsMode
    served_model_name: str | None


def parse_options(arguments: Sequence[str]) -> Options:
    """Parses the arguments after the program's name; prints usage and exits with code 2 on a bad one."""
    parser = argparse.ArgumentParser(
        prog="python -m inference_service", description="Serve a model over vLLM's RL HTTP protocol."
    )
    parser.add_argument("--engine", choices=["transformers"], default="transformers")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint: a directory or a hub name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000, help="0 picks a free one (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
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
        default="raw_logprobs",
        help="log-probs of the raw model, or after temperature and truncation (default: %(default)s)",
    )
    parser.add_argument("--served-model-name", default=None, help="the name clients use (default: --model)")
    return Options(**vars(parser.parse_args(arguments)))


def require_checkpoint(model: str) -> None:
    """Refuses a path without a model; a hub name (`owner/name`) passes, and is looked up when it is loaded.

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


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port: expected 0 to 65535")
    return value
