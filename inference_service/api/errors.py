"""Errors on the wire: every exception becomes the status and body that vLLM would respond with."""

from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from async_rl.errors import AsyncRLError
from async_rl.shared.net.http_guard import error_body, error_response, invalid_request
from inference_service.engine_interface import OutOfService, RequestRefused


class UnknownModel(AsyncRLError):
    """A request names a model that this server does not serve (HTTP 404)."""


def install(app: FastAPI) -> None:
    """Turns every error of a handler into a response in the protocol's format; unknown routes keep FastAPI's own."""
    app.add_exception_handler(RequestValidationError, invalid_request)
    for kind in (RequestRefused, AsyncRLError, Exception):
        app.add_exception_handler(kind, _failed)


def body_of(error: Exception) -> str:
    """The error body as JSON, for a response whose status has been sent already."""
    return error_body(*_described(error))


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(*_described(error))


def _described(error: Exception) -> tuple[str, HTTPStatus, str | None]:
    """Message, status and the field that caused the error."""
    message = str(error) or repr(error)
    if isinstance(error, RequestRefused):
        return message, HTTPStatus.BAD_REQUEST, error.param
    if isinstance(error, UnknownModel):
        return message, HTTPStatus.NOT_FOUND, "model"
    if isinstance(error, OutOfService):
        return message, HTTPStatus.SERVICE_UNAVAILABLE, None
    return message, HTTPStatus.INTERNAL_SERVER_ERROR, None
