"""A JSON service that a reward asks, over HTTP: patient with one that is busy or away, and clear about one that fails.

Each worker process has one `Service`. A request is made again, after pauses that double, while the service answers 429
or 5xx, refuses connections or loses them, as long as the time of the call allows.
"""

import asyncio
import json
import random
import time
from contextlib import suppress
from typing import Any

import aiohttp

from async_rl.config.reward_section import HTTPOptions
from async_rl.rollouts.rewards.base import USED_SHARE
from async_rl.rollouts.rewards.service_token import read_token
from async_rl.shared.json_values import as_json

FIRST_PAUSE_S = 0.25

MAX_PAUSE_S = 10.0

MAX_ANSWER_BYTES = 16 * 2**20

MAX_SHOWN = 300
"""Characters of an answer in an error."""

BUSY = (408, 429)
"""Statuses that ask to come again, besides those from 500 on."""


class ServiceFailed(Exception):
    """The service gave no answer, or one that is not what was expected; the message names its URL."""


class _Unavailable(Exception):
    """It may answer if asked again."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class Service:
    """One URL; its methods run on the worker's event loop."""

    def __init__(self, url: str, options: HTTPOptions, timeout_s: float) -> None:
        """
        Raises:
            ConfigError: the token cannot be read.
        """
        self.url = url
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        self._token = read_token(options)
        if self._token is not None:
            self._headers["Authorization"] = f"Bearer {self._token}"
        self._session: aiohttp.ClientSession | None = None

    def deadline(self) -> float:
        """When a call that begins now has to be done, on the clock of `time.monotonic`."""
        return time.monotonic() + USED_SHARE * self._timeout_s

    def without_token(self, text: str) -> str:
        """For errors and logs: a service may repeat what it was sent."""
        return text if self._token is None else text.replace(self._token, "[token]")

    async def ask(self, body: Any, deadline: float) -> Any:
        """The JSON that the service answers.

        Raises:
            ServiceFailed: see there.
        """
        data = json.dumps(as_json(body), allow_nan=False).encode()
        pause_s, num_asked = FIRST_PAUSE_S, 0
        while True:
            num_asked += 1
            try:
                return await self._ask_once(data, deadline)
            except _Unavailable as reason:
                # Apart from each other: many may have been refused at the same time.
                wait_s = max(reason.pause_s, pause_s * random.uniform(0.5, 1.0))
                if time.monotonic() + wait_s >= deadline:
                    raise ServiceFailed(
                        f"{self.url}: {reason}; asked {num_asked} times in {USED_SHARE:.0%} of reward.timeout_s = "
                        f"{self._timeout_s:g} s: start or repair it, or raise the limit"
                    ) from reason.__cause__
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _ask_once(self, data: bytes, deadline: float) -> Any:
        # A total of 0 would be no limit.
        timeout = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
        try:
            async with self._open().post(
                self.url, data=data, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as reply:
                said = await self._read(reply)
        except TimeoutError as error:
            raise ServiceFailed(
                f"{self.url}: no answer within {USED_SHARE:.0%} of reward.timeout_s = {self._timeout_s:g} s: raise it, "
                "or lower reward.max_concurrency if the service is overloaded"
            ) from error
        except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
            raise ServiceFailed(f"{self.url}: no connection: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        if reply.status in BUSY or reply.status >= 500:
            raise _Unavailable(f"status {reply.status}: {self._shown(said)}", _retry_after_s(reply))
        if reply.status != 200:
            raise ServiceFailed(f"{self.url}: status {reply.status}, expected 200: {self._shown(said)}")
        try:
            return json.loads(said)
        except (ValueError, RecursionError) as error:
            raise ServiceFailed(f"{self.url}: expected JSON, but it answered: {self._shown(said)}") from error

    async def _read(self, reply: aiohttp.ClientResponse) -> bytes:
        said = bytearray()
        async for chunk in reply.content.iter_any():
            said += chunk
            if len(said) > MAX_ANSWER_BYTES:
                raise ServiceFailed(
                    f"{self.url}: expected a short answer, but it is longer than {MAX_ANSWER_BYTES} bytes: "
                    f"{self._shown(said)}"
                )
        return bytes(said)

    def _shown(self, said: bytes | bytearray) -> str:
        """The beginning of an answer, for an error."""
        text = self.without_token(said.decode(errors="replace"))
        return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")

    def _open(self) -> aiohttp.ClientSession:
        """On the first call: a session belongs to the running loop. How many requests there are is not its concern."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


def _retry_after_s(reply: aiohttp.ClientResponse) -> float:
    """What the service says, in seconds; it may also say a date, which is ignored."""
    with suppress(ValueError, OverflowError):
        return max(float(int(reply.headers.get("Retry-After", ""))), 0.0)
    return 0.0
