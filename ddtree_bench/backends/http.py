"""The few small HTTP calls that a launch needs: health, model id, settings, one generation. Load has its own client."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from ddtree_bench.errors import ServerError

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a server on this machine is behind no proxy


def get(url: str, *, timeout_s: float = 10.0) -> Any:
    """GET and return the JSON body, or the text where it is no JSON."""
    return _send(urllib.request.Request(url), timeout_s)


def post(url: str, body: Any, *, timeout_s: float) -> Any:
    """POST JSON and return the JSON body."""
    data = json.dumps(body).encode()
    return _send(urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}), timeout_s)


def _send(request: urllib.request.Request, timeout_s: float) -> Any:
    """Send a request.

    Raises:
        ServerError: kind http_NNN for an error status, "timeout", or "connect" where nobody answers.
    """
    what = f"{request.get_method()} {request.full_url}"
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            text = answer.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            body = error.read().decode("utf-8", errors="replace")[:300]
        raise ServerError(f"{what} must answer 200; given {error.code}: {body}", kind=f"http_{error.code}") from error
    except TimeoutError as error:
        raise ServerError(f"{what} must answer within {timeout_s:g} s; it did not", kind="timeout") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        kind = "timeout" if isinstance(reason, TimeoutError) else "connect"
        raise ServerError(f"{what} must be answered; {reason}", kind=kind) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
