"""Builds model, engine and application, and serves them on an open socket until a signal or the fleet ends it."""

import logging
import os
import socket
import threading
from collections.abc import Mapping
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI
from transformers.utils import logging as transformers_logging

from async_rl.errors import ConfigError, ProcessFailed
from async_rl.shared.cpu.reproducible import use_reproducible_products
from async_rl.shared.net.bounded_connections import ACCEPTS, BACKLOG
from async_rl.shared.net.bounded_http import BoundedHttp
from inference_service.address import LEAVE_TIMEOUT_S, registration_of, url_of, warn_if_exposed
from inference_service.api.app import ServerInfo, make_app
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.kernels import EXACT, FASTEST
from inference_service.engine.model import LoadedModel, load_model
from inference_service.engine.transformers_engine import TransformersEngine
from inference_service.identity import identity_headers, new_boot_id
from inference_service.options import Options
from inference_service.registration import Registration

logger = logging.getLogger("inference_service")

CLOSE_CONNECTIONS_S = 1
"""How long a stopping server waits for responses in flight."""


class Server(uvicorn.Server):
    """Starts the engine in the server's event loop, and logs when it accepts requests.

    With a registration, the instance then joins a fleet, and ends when the fleet releases it. The first signal requests
    the release, while the server continues to serve; the second ends the server at once. Without a registration the
    first signal does that.
    """

    def __init__(
        self, config: uvicorn.Config, engine: TransformersEngine, url: str, registration: Registration | None
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._url = url
        self._registration = registration
        self._leaving: threading.Thread | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.start()
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
        logger.info("ready at %s", self._url)
        if self._registration is not None:
            self._registration.start()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends the server.

        A dead engine is reported to the requests that waited for it, which are answered within the grace time.
        """
        is_free = self._registration is not None and self._registration.leave_requested.is_set()
        has_left = self._leaving is not None and not self._leaving.is_alive()
        return await super().on_tick(counter) or is_free or has_left or self._engine.death is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._registration is None or self._leaving is not None:
            super().handle_exit(sig, frame)
            return
        self._leaving = threading.Thread(target=self._registration.leave, args=(LEAVE_TIMEOUT_S,), daemon=True)
        self._leaving.start()


def serve(options: Options, listener: socket.socket, token: str | None) -> None:
    """Loads the model and serves it on `listener`; returns when a signal or the fleet has ended it.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit, or the instance cannot join the fleet with these
            options; or `--exact` on a processor without what it needs.
        FleetLost: no fleet has answered for `--patience-s`.
        ProcessFailed: the engine died; whoever started the instance starts another one.
    """
    warn_if_exposed(options.host, token)
    boot_id = new_boot_id()
    registration = registration_of(options, listener, token, boot_id)
    # torch reads OMP_NUM_THREADS itself, but uses it for inter-operator threads too.
    torch.set_num_threads(_num_threads(os.environ))
    if options.exact:
        use_reproducible_products()
    # The log of an instance is not an interactive terminal: one line when it is ready is enough.
    transformers_logging.disable_progress_bar()
    device = torch.device(options.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    loaded = load_model(options.model, device, dtype, asleep=options.asleep)
    engine = _make_engine(options, loaded, device, dtype)
    name = options.served_model_name or options.model
    identity = identity_headers(boot_id, options.max_concurrency)
    app = make_app(engine, loaded.codec, ServerInfo(name, options.model), token, identity)
    try:
        _run(app, engine, listener, registration)
    finally:
        engine.close()


def _num_threads(environment: Mapping[str, str]) -> int:
    """OpenMP's variable may list a number for each level of nested regions; one that it would ignore is ignored."""
    reported = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(reported) if reported.isdecimal() and int(reported) > 0 else os.cpu_count() or 1


def _make_engine(options: Options, loaded: LoadedModel, device: torch.device, dtype: torch.dtype) -> TransformersEngine:
    max_model_len = options.max_model_len or loaded.max_positions
    if max_model_len > loaded.max_positions:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's {loaded.max_positions} positions: lower it"
        )
    kernels = EXACT if options.exact else FASTEST
    weights = sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())
    size = plan_cache(
        loaded.model.config,
        dtype,
        device,
        options.max_concurrency,
        max_model_len,
        kernels.width,
        weights if options.asleep else None,
    )
    return TransformersEngine(loaded, size, max_model_len, options.logprobs_mode, kernels)


def _run(app: FastAPI, engine: TransformersEngine, listener: socket.socket, registration: Registration | None) -> None:
    try:
        # Two starting instances can both bind a port; only one can listen.
        listener.listen()
    except OSError as error:
        address = url_of(listener).removeprefix("http://")
        raise ConfigError(f"cannot listen at {address}: {error.strerror}; choose another --port") from error
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        backlog=ACCEPTS,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
    )
    Server(config, engine, url_of(listener), registration).run(sockets=[listener])
    if engine.death is not None:
        raise ProcessFailed(f"{engine.death}; the traceback is in this log")
    if registration is not None:
        registration.require_fleet()
