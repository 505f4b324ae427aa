"""Builds model, engine and application, and serves them on an open socket until a signal ends it."""

import logging
import os
import socket

import torch
import uvicorn
from fastapi import FastAPI
from transformers.utils import logging as transformers_logging

from async_rl.errors import ConfigError
from inference_service.app import ServerInfo, make_app
from inference_service.cache_size import plan_cache
from inference_service.model import LoadedModel, load_model
from inference_service.options import Options
from inference_service.transformers_engine import TransformersEngine

logger = logging.getLogger("inference_service")

CLOSE_CONNECTIONS_S = 1
"""How long a stopping server waits for answers that are under way."""


class Server(uvicorn.Server):
    """Starts the engine in the server's event loop, and says when the first request is welcome."""

    def __init__(self, config: uvicorn.Config, engine: TransformersEngine, url: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.start()
        await super().startup(sockets=sockets)
        logger.info("ready at %s", self._url)


def serve(options: Options, listener: socket.socket, token: str | None) -> None:
    """Loads the model and serves it on `listener`; returns when a signal has ended the server.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit.
    """
    # torch reads OMP_NUM_THREADS itself, but takes it for the threads between operators too.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    # The log of an instance is read by programs and people, not watched: one line when it is ready is enough.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = torch.device(options.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    loaded = load_model(options.model, device, dtype)
    engine = _make_engine(options, loaded, device, dtype)
    name = options.served_model_name or options.model
    app = make_app(engine, loaded.codec, ServerInfo(name, options.model), token)
    try:
        _run(app, engine, listener)
    finally:
        engine.close()


def _make_engine(options: Options, loaded: LoadedModel, device: torch.device, dtype: torch.dtype) -> TransformersEngine:
    max_model_len = options.max_model_len or loaded.max_positions
    if max_model_len > loaded.max_positions:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's {loaded.max_positions} positions: lower it"
        )
    size = plan_cache(loaded.model.config, dtype, device, options.max_concurrency, max_model_len)
    return TransformersEngine(loaded, size, max_model_len, options.logprobs_mode)


def _run(app: FastAPI, engine: TransformersEngine, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    try:
        # Two starting instances can both bind a port; only one can listen.
        listener.listen()
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port") from error
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSE_CONNECTIONS_S)
    Server(config, engine, f"http://{host}:{port}").run(sockets=[listener])
