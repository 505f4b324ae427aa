"""Errors as OpenAI's API reports them, so that clients treat them as they treat OpenAI's."""

from http import HTTPStatus
from typing import Any

from aiohttp import web

MAX_MESSAGE_CHARS = 2000
"""Longer messages are cut: they may repeat a value of the request, which can be long."""

TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "server_error",
}


class ApiError(Exception):
    """Ends a request with this status; `code` is for programs, `param` names the field of the request."""

    def __init__(self, status: HTTPStatus, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        # JSON escapes may contain lone surrogates, and messages repeat parts of a request.
        message = str(self)[:MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        headers = {}
        if self.status is HTTPStatus.SERVICE_UNAVAILABLE:
            # OpenAI's clients would send the request again; it fails because the run is ending.
            headers["x-should-retry"] = "false"
        return web.json_response(self.body(), status=self.status, headers=headers)


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, "invalid_request", message, param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, "unsupported_parameter", message, param)
