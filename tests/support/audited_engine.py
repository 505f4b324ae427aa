"""The embedded engine behind its real HTTP server, in a thread of the test, for audits of many of them."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from async_rl.shared.net.bounded_connections import ACCEPTS, BACKLOG
from async_rl.shared.net.bounded_http import BoundedHttp
from inference_service.api.app import ServerInfo, make_app
from inference_service.engine.model import load_model
from inference_service.identity import identity_headers
from inference_service.options import parse_options
from inference_service.server import Server, _make_engine
from tests.support.waiting import wait_for

END_TIMEOUT_S = 20.0

ASGI = Callable[..., Any]


@contextmanager
def audited_engine(
    checkpoint: Path,
    *arguments: str,
    change: Callable[[Any], None] = lambda model: None,
    wrap: Callable[[FastAPI], ASGI] = lambda app: app,
) -> Iterator[str]:
    """Its URL.

    Args:
        arguments: of `async-rl serve`.
        change: of the loaded model, before the engine has it.
        wrap: of the application, for answers that are otherwise.
    """
    options = parse_options(["--model", str(checkpoint), "--port", "0", *arguments])
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    loaded = load_model(str(checkpoint), torch.device("cpu"), dtype)
    with torch.no_grad():
        change(loaded.model)
    engine = _make_engine(options, loaded, torch.device("cpu"), dtype)
    app = make_app(engine, loaded.codec, ServerInfo("audited", str(checkpoint)), None, identity_headers("0", 64))
    try:
        with served_app(wrap(app), lambda config, url: Server(config, engine, url, None)) as url:
            yield url
    finally:
        engine.close()


@contextmanager
def served_app(
    app: ASGI, make: Callable[[uvicorn.Config, str], uvicorn.Server] = lambda config, url: uvicorn.Server(config)
) -> Iterator[str]:
    """Serves an application in a thread; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=BoundedHttp, backlog=ACCEPTS, log_level="error", access_log=False, timeout_graceful_shutdown=1
    )
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make(config, url)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    # uvicorn has it wait for `ACCEPTS` alone; all of an audit's requests come at once.
    listener.listen(BACKLOG)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(END_TIMEOUT_S)
        assert not thread.is_alive(), "the server did not end"


def with_config(checkpoint: Path, target: Path, **changes: Any) -> Path:
    """The same weights and tokenizer under another config.json, in the directory `target`."""
    shutil.copytree(checkpoint, target)
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return target


def edited(edit: Callable[[str, dict[str, Any]], None]) -> Callable[[Any], ASGI]:
    """A wrapper under which `edit(path, body)` changes the JSON bodies of answers."""

    def wrap(app: Any) -> ASGI:
        async def call(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            start: dict[str, Any] = {}
            parts: list[bytes] = []

            async def keep(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    start.update(message)
                    return
                parts.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                content = b"".join(parts)
                if start["status"] == 200 and content.startswith(b"{"):
                    body = json.loads(content)
                    edit(scope["path"], body)
                    content = json.dumps(body).encode()
                kept = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
                start["headers"] = [*kept, (b"content-length", str(len(content)).encode())]
                await send(start)
                await send({"type": "http.response.body", "body": content})

            await app(scope, receive, keep)

        return call

    return wrap


async def read_body(receive: Any) -> bytes:
    """Of a request, whole."""
    content, is_whole = b"", False
    while not is_whole:
        message = await receive()
        content += message.get("body", b"")
        is_whole = not message.get("more_body")
    return content


def given(content: bytes, receive: Any) -> Any:
    """A `receive` that has this body, and then what else comes."""
    messages = iter([{"type": "http.request", "body": content}])

    async def again() -> Any:
        return next(messages, None) or await receive()

    return again


def asked(edit: Callable[[str, dict[str, Any]], None]) -> Callable[[Any], ASGI]:
    """A wrapper under which `edit(path, body)` changes the JSON bodies of requests."""

    def wrap(app: Any) -> ASGI:
        async def call(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            body = json.loads(await read_body(receive))
            edit(scope["path"], body)
            content = json.dumps(body).encode()
            kept = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
            scope = {**scope, "headers": [*kept, (b"content-length", str(len(content)).encode())]}
            await app(scope, given(content, receive), send)

        return call

    return wrap
