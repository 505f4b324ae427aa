"""`async-rl audit --engine URL --checkpoint DIR`: whether a running engine serves a checkpoint, and what is at fault.

Exit codes: 0 all that was tested holds, 1 something does not, 2 nothing could be tested: an option, the checkpoint, the
engine or its answers are of no use.
"""

import argparse
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from async_rl.errors import AsyncRLError, WriteFailed
from async_rl.records.findings import all_hold, report, show
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text
from async_rl.shared.programs.extras import require_extras


def make_parser() -> Parser:
    parser = Parser(
        "async-rl audit",
        "Asks a running engine, scores its tokens by a checkpoint in float32, and names what it does otherwise. "
        "It changes nothing there.",
        "--engine URL --checkpoint DIR [--adapter DIR] [--before DIR] [--update-via CMD] [--json]",
    )
    parser.add_argument("--engine", required=True, metavar="URL", help="of vLLM, the embedded engine or SGLang")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="what was trained, as Hugging Face has it")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="adapters beside it, as peft has them")
    parser.add_argument("--before", type=Path, metavar="DIR", help="the weights, or adapters, of the step before")
    parser.add_argument(
        "--update-via", metavar="CMD", help="run this between two rounds: it gives the engine the checkpoint's weights"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="what the engine is to compute in (default: config.json's)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="the only one that training samples at (default: 1 and 0.7 are asked for)",
    )
    parser.add_argument("--model", metavar="NAME", help="what requests name (default: the first that the server lists)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the checkpoint is scored")
    parser.add_argument(
        "--timeout-s", type=_seconds, default=300.0, help="for each answer, and the command (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


class _Ended(BaseException):
    """A signal, which ends the command of an update, too; `code` is the exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


class _Output(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the program by 1.
        raise BrokenPipeError("nobody reads it")


def main(argv: Sequence[str]) -> int:
    arguments = vars(make_parser().parse_args(argv))
    try:
        return _run(arguments, as_json=arguments.pop("json"))
    except AsyncRLError as error:
        said = f"{type(error).__name__}: {error_text(error)}"
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Ended as end:
        return end.code
    except Exception:
        # By 1, Python's own code, whoever called it would take the engine for faulty.
        said = traceback.format_exc()
    # A log on a full disk changes no exit code.
    with suppress(OSError, ValueError):
        print(said, file=sys.stderr, flush=True)
    return USAGE_ERROR


def _run(arguments: Mapping[str, Any], *, as_json: bool) -> int:
    started_s = time.monotonic()
    require_extras("async-rl audit", "serve")
    # They take seconds to import, and a wrong option is reported before.
    from trainer.audit.audit import audit
    from trainer.audit.given import Options

    about, findings = audit(Options(**arguments, token=os.environ.get("ASYNC_RL_TOKEN")))
    try:
        if as_json:
            print(report({**about, "seconds": round(time.monotonic() - started_s, 1)}, findings), end="")
        else:
            show(_Output(), findings, "async-rl audit")
        print(end="", flush=True)
    except OSError as error:
        raise WriteFailed(f"the findings cannot be written to standard output: {error}; ask for them again") from error
    return 0 if all_hold(findings) else 1


def _temperature(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is no temperature to sample at: expected 0.01 to 100")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time limit: expected seconds")
    return value


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended(number)


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGHUP):
        # What nohup ignores stays ignored.
        if signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, _end)
    code = main(sys.argv[1:])
    # Python would wait for the threads of requests that an engine has not answered yet.
    os._exit(code)
