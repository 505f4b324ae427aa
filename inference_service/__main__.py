"""`python -m inference_service --model PATH`: one inference instance until SIGTERM or SIGINT.

Exit codes: 0 after a signal or when its fleet has let it go, 2 for bad input (one line on stderr names it), 3 when no
fleet has answered for `--patience-s`, 1 for anything unexpected, such as an exit of vLLM.
"""

import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType, ModuleType
from typing import NoReturn

from async_rl.errors import ConfigError, FleetLost, ProcessFailed
from async_rl.shared.net.http_client import http_url
from async_rl.shared.net.listener import bound
from async_rl.shared.net.local_address import missing_loopback
from async_rl.shared.programs.error_text import error_text
from async_rl.shared.programs.extras import SERVES_WITH, require_extras
from async_rl.shared.programs.failure_report import report_failure
from async_rl.shared.programs.loading import loading
from async_rl.shared.programs.nccl_package import HAS_NCCL, nccl_package
from inference_service.options import TOKEN_VARIABLE, Options, parse_options, require_checkpoint
from inference_service.vllm.server import serve_vllm
from inference_service.vllm.versions import find_vllm

EXIT_CODES = {ConfigError: 2, FleetLost: 3, ProcessFailed: 1}


def main() -> int:
    options = parse_options(sys.argv[1:])
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("inference_service").setLevel(logging.INFO)
    _end_by(_end)
    try:
        require_checkpoint(options.model)
        if options.engine == "transformers":
            require_extras("async-rl serve", "serve")
        if options.check:
            engine = (
                f"vLLM {find_vllm(options.device, options.engine_options)}"
                if options.engine == "vllm"
                else "transformers"
            )
            print(f"{SERVES_WITH} {engine}", flush=True)
            if (nccl := nccl_package()) is not None:
                print(f"{HAS_NCCL} {nccl}", flush=True)
            return 0
        listener = _bind(options)
        if options.engine == "vllm":
            serve_vllm(options, listener, os.environ)
        else:
            # Imported late, since torch and transformers take seconds: bad arguments and ports are reported before
            # that.
            # An exception amid an import may be swallowed, or leave half a module to be used.
            _end_by(_end_at_once)
            with loading():
                server = _import_server(options)
            _end_by(_end)
            server.serve(options, listener, os.environ.get(TOKEN_VARIABLE) or None)
    except (ConfigError, FleetLost, ProcessFailed) as error:
        report_failure(error, os.environ)
        print(f"inference_service: {error_text(error)}", file=sys.stderr)
        return EXIT_CODES[type(error)]
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _import_server(options: Options) -> ModuleType:
    importlib.import_module("async_rl.shared.cpu.model_scan").scan_models_once()
    lean_imports = importlib.import_module("async_rl.shared.cpu.lean_imports")
    with lean_imports.without_compiler() if options.device == "cpu" else nullcontext():
        return importlib.import_module("inference_service.server")


def _end_by(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the program while it loads. While it serves, uvicorn's handler calls this one when it exits."""
    raise SystemExit(0)


def _bind(options: Options) -> socket.socket:
    """Binds the port immediately, so that no other instance takes it; listens only when ready."""
    try:
        return bound(options.host, options.port)
    except OSError as error:
        remedy = missing_loopback(options.host, "--host") or "choose another --port, or 0 for a free one"
        raise ConfigError(
            f"cannot listen at {http_url(options.host, options.port)}: {error.strerror}; {remedy}"
        ) from error


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still be in torch or in a network wait that cannot be interrupted; nothing is left to save.
    os._exit(code)
