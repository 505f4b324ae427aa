"""Errors on the wire: every exception becomes the status and body that vLLM would answer with."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from async_rl.errors import AsyncRLError
from async_rl.protocol import ErrorInfo, ErrorResponse
from inference_service.engine import OutOfService, RequestRefused

TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


class UnknownModel(AsyncRLError):
    """A request names a model that this server does not serve (HTTP 404)."""


def error_response(message: str, status: HTTPStatus, param: str | None = None) -> JSONResponse:
    """The error body of the protocol: `{"error": {message, type, param, code}}`."""
    kind = TYPES.get(status, status.phrase)
    body = ErrorResponse(error=ErrorInfo(message=message, type=kind, param=param, code=status.value))
    return JSONResponse(body.model_dump(), status_code=status.value)


def install(app: FastAPI) -> None:
    """Makes every error of a handler an answer in the protocol's shape; unknown routes keep FastAPI's own."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(AsyncRLError, _failed)
    app.add_exception_handler(Exception, _failed)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part != "body")
    return error_response(f"{param or 'body'}: {first['msg']}", HTTPStatus.BAD_REQUEST, param or None)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestRefused)
    return error_response(str(error), HTTPStatus.BAD_REQUEST, error.param)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownModel):
        return error_response(str(error), HTTPStatus.NOT_FOUND, "model")
    if isinstance(error, OutOfService):
        return error_response(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
    return error_response(str(error) or repr(error), HTTPStatus.INTERNAL_SERVER_ERROR)
