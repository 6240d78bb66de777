"""The command line's way to a service: one that is running, or one started here for the length of the command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from app.settings import Settings, local_url

_PROBE_S = 2.0
_NO_TEXT = "an argument holds bytes that are no text in this terminal's encoding; type it again"


class RequestFailed(Exception):
    """The service refused a request; the message is its own. `status` is the HTTP status that it refused it with."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Calls of the HTTP API that the commands need."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def json(self, method: str, path: str, **arguments: Any) -> Any:
        """The body of an answer.

        Raises:
            RequestFailed: the service refused, or cannot be reached.
        """
        try:
            response = await self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise RequestFailed(f"the service does not answer ({type(error).__name__}: {error})") from error
        except UnicodeEncodeError as error:
            raise RequestFailed(_NO_TEXT) from error
        _require_success(response)
        return response.json() if response.content else None

    async def events(self, method: str, path: str, **arguments: Any) -> AsyncIterator[tuple[str, Any]]:
        """Server-sent events as (name, data).

        Raises:
            RequestFailed: the service refused, sent an error event, or went away.
        """
        try:
            async with self._http.stream(method, path, **arguments) as response:
                if response.is_error:
                    await response.aread()
                _require_success(response)
                name = "message"
                async for line in response.aiter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        data = json.loads(value)
                        if name == "error":
                            raise RequestFailed(data["message"])
                        yield name, data
        except httpx.HTTPError as error:
            raise RequestFailed(f"the service went away ({type(error).__name__}: {error})") from error
        except UnicodeEncodeError as error:
            raise RequestFailed(_NO_TEXT) from error


@contextlib.asynccontextmanager
async def connect(settings: Settings, *, needs_engine: bool, say: Callable[[str], None]) -> AsyncIterator[Client]:
    """A client of the running service, or of one that is started here and ends with the context."""
    address = local_url(settings.host, settings.port)
    if await _is_foreword(address):
        async with _http(address) as http:
            yield Client(http)
        return
    from app.server import running

    what = "loading the models, about a minute" if needs_engine else "loading the small models"
    say(f"no service at {address}; starting one for this command ({what})")
    local = settings.model_copy(update={"host": "127.0.0.1", "port": 0})
    async with running(local, with_engine=needs_engine) as (url, _), _http(url) as http:
        yield Client(http)


def _http(address: str) -> httpx.AsyncClient:
    # Reading a long prompt may take minutes without a byte; heartbeats come more often than this.
    # The service is local: proxies of the environment do not concern it.
    return httpx.AsyncClient(base_url=address, timeout=httpx.Timeout(60.0, read=600.0), trust_env=False)


async def _is_foreword(address: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=_PROBE_S, trust_env=False) as http:
            return bool((await http.get(f"{address}/health")).json().get("service") == "foreword")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError):
        return False


def _require_success(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the service answered {response.status_code} {response.reason_phrase}"
    raise RequestFailed(message, response.status_code)
