"""The gateway of a leader: an OpenAI-compatible endpoint on the producer's event loop, with a key for each rollout.

An agent that cannot be changed is given a base URL and a key; what it sends there is sampled by the rollout's session
and recorded token for token. The key is bound to the session, and with it to the group, the rollout and the weight
version; it ends with the rollout.
"""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from async_rl.config.rollout_section import RolloutSection
from async_rl.parts.gateway.api_error import ApiError
from async_rl.parts.gateway.exchanges import Exchanges
from async_rl.parts.gateway.ignored_fields import IgnoredFields
from async_rl.parts.gateway.server import make_app
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.data.prompts import Tokenizer
from async_rl.shared.net.bounded_site import BoundedSite
from async_rl.shared.net.listener import is_open_to_network, listen, url_for_others

NUM_BYTES = 16


class Keys:
    """Mints keys, and tells a key that it has minted from any other without keeping them."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def mint(self) -> str:
        nonce = secrets.token_hex(NUM_BYTES)
        return f"{nonce}{self._signature(nonce)}"

    def has_minted(self, key: str) -> bool:
        nonce, signature = key[: 2 * NUM_BYTES], key[2 * NUM_BYTES :]
        # As bytes: texts that are not ASCII cannot be compared.
        return hmac.compare_digest(signature.encode(errors="replace"), self._signature(nonce).encode())

    def _signature(self, nonce: str) -> str:
        return hmac.new(self._secret, nonce.encode(errors="replace"), hashlib.sha256).hexdigest()[: 2 * NUM_BYTES]


log = logging.getLogger(__name__)

HTTP_LOG = logging.getLogger(f"{__name__}.http")
"""Of aiohttp, which reports each malformed request with a traceback; whoever sends one gets a 400 that says so."""

HTTP_LOG.setLevel(logging.CRITICAL)

MODEL = "policy"
"""The name under which the policy is listed; any other name means it, too."""

IDLE_S = 75.0
"""A connection without a whole request is closed after this time; also one whose headers never end. Longer than other
servers wait: agents keep connections while their tools run."""

CLOSE_CONNECTIONS_S = 1.0
"""How long running requests may take when the gateway stops."""


@dataclass(frozen=True, slots=True)
class Access:
    """What an agent needs: `base_url` has the key in its path; `{root_url}/v1` with the key as API key does as well."""

    base_url: str
    root_url: str
    key: str


class Gateway:
    """Serves rollouts from `start` to `stop`, which both run on the producer's event loop.

    Args:
        address: at which other hosts reach this one, if `rollout.options.gateway_host` means all its interfaces; None
            determines one.
    """

    def __init__(self, rollout: RolloutSection, tokenizer: Tokenizer, address: str | None = None) -> None:
        self.url = ""
        """Known after `start`."""
        self._rollout = rollout
        self._tokenizer = tokenizer
        self._address = address
        self._keys = Keys()
        self._exchanges_of: dict[str, Exchanges] = {}
        self._site: BoundedSite | None = None

    async def start(self) -> None:
        """Listens.

        Raises:
            ConfigError: the address cannot be used.
        """
        listener = listen("the gateway", self._rollout.options.gateway_host, 0, "rollout.options.gateway_host")
        self.url = url_for_others(listener, self._address)
        if is_open_to_network(listener):
            log.warning(
                "the gateway at %s is open to the network; the keys of rollouts travel unencrypted, and who has one "
                "speaks for its agent: keep the network private",
                self.url,
            )
        app = make_app(self._find_exchanges, IgnoredFields(self._rollout.temperature), self._decode, MODEL)
        runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            logger=HTTP_LOG,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=CLOSE_CONNECTIONS_S,
        )
        self._site = BoundedSite(runner, listener, IDLE_S)
        await self._site.start()
        log.info("the gateway for agents listens at %s", self.url)

    async def stop(self) -> None:
        """Closes all connections; does nothing if it was not started."""
        if self._site is not None:
            await self._site.stop()
            self._site = None

    @contextmanager
    def serving(self, session: RolloutSession) -> Iterator[Access]:
        """Serves the session under a key of its own, which is refused from the end on; then it may be finished."""
        key = self._keys.mint()
        exchanges = self._exchanges_of[key] = Exchanges(session)
        try:
            yield Access(f"{self.url}/r/{key}/v1", self.url, key)
        finally:
            del self._exchanges_of[key]
            exchanges.close()

    def _find_exchanges(self, key: str) -> Exchanges | None:
        exchanges = self._exchanges_of.get(key)
        if exchanges is None and not self._keys.has_minted(key):
            message = "this is no key of a rollout: use the base URL or the API key that the agent was started with"
            raise ApiError(HTTPStatus.UNAUTHORIZED, "invalid_api_key", message)
        return exchanges

    def _decode(self, token_ids: Sequence[int]) -> Sequence[str]:
        return self._tokenizer.batch_decode([[token_id] for token_id in token_ids], skip_special_tokens=False)
