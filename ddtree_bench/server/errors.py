"""Errors that a client gets, in OpenAI's JSON shape."""

from __future__ import annotations

from typing import Any

TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """A request that is answered with an error body.

    Args:
        message: what must hold, what was given, what to do.
        param: the field of the request's body, when one is at fault.
        status: HTTP status.
        code: short machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class EngineUnavailable(ApiError):
    """The engine is not ready, failed, or is stopping."""

    def __init__(self, message: str, *, code: str = "engine_unavailable") -> None:
        super().__init__(message, status=503, code=code)
