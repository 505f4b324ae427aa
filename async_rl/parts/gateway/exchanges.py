"""The line of one rollout: its requests become turns of its session, each once; for `gateway` and `server`.

Clients send a request again when an answer is late, and go away. So a generation belongs to the request that it
answers, by the digest of its body, and not to the connection: a request that is sent again joins it. One whose clients
have all gone is kept for `RETRY_GRACE_S`, in which they may come back; then it is ended, or forgotten if it was ready.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from async_rl.errors import AsyncRLError
from async_rl.parts.gateway.answer import Answer
from async_rl.parts.gateway.api_error import ApiError, bad_request
from async_rl.parts.gateway.turn_request import TurnRequest
from async_rl.rollouts.agents.messages import InvalidRequest
from async_rl.rollouts.agents.session import LimitReached, RolloutSession, SessionClosed, Turn

RETRY_GRACE_S = 10.0
"""How long a client may take to send a request again; OpenAI's waits half a second at first and 8 s at most."""

MAX_REQUESTS = 64
"""Of one rollout at once; others get a 429, after which clients come again."""

NUM_LAST_ANSWERS = 4
"""After a limit of its rollout an agent may end in its own way; one that still asks gets an error."""


@dataclass(eq=False, slots=True)
class Exchange:
    """A request and its turn. `num_clients` wait for it; `arrived`: it has been sent, or is being sent, to one.

    `source` is the request's field with the messages, for errors.
    """

    digest: bytes
    source: str
    task: "asyncio.Task[Turn]"
    num_clients: int = 0
    arrived: bool = False
    answer: Answer | None = None
    timer: asyncio.TimerHandle | None = None


class Exchanges:
    """Serves the requests of one rollout until it is closed."""

    def __init__(self, session: RolloutSession) -> None:
        self._session = session
        self._exchanges: dict[bytes, Exchange] = {}
        """By digest; of requests that are the same, the newest."""
        self._open: set[Exchange] = set()
        """Those whose turn has not arrived."""
        self._num_requests = 0
        self._num_after_limit = 0
        self._closed = False

    def enter(self) -> None:
        """Counts a request, which ends with `leave`.

        Raises:
            ApiError: there are too many.
        """
        if self._num_requests == MAX_REQUESTS:
            message = f"the rollout has {MAX_REQUESTS} requests under way: wait for one of them"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, "too_many_requests", message)
        self._num_requests += 1

    def leave(self) -> None:
        self._num_requests -= 1

    def join(self, request: TurnRequest, digest: bytes, is_retry: bool) -> Exchange:
        """The exchange of a request, which ends with `part`.

        A request is a new one, unless its client says that it sends it again or the same one has lost its clients.
        """
        exchange = self._exchanges.get(digest)
        abandoned = exchange is not None and not exchange.num_clients and not exchange.arrived
        if exchange is None or not (is_retry or abandoned):
            generating = self._session.generate(
                messages=request.messages,
                tools=request.tools,
                max_tokens=request.max_tokens,
                stop=request.stop,
            )
            exchange = self._exchanges[digest] = Exchange(digest, request.source, asyncio.create_task(generating))
            # Nobody may be waiting when it fails.
            exchange.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._open.add(exchange)
        exchange.num_clients += 1
        return exchange

    async def answer(self, exchange: Exchange) -> Answer:
        """Waits for the turn.

        Raises:
            ApiError: there is none.
        """
        try:
            turn = await asyncio.shield(exchange.task)
        except LimitReached as limit:
            self._forget(exchange)
            return self._after(limit, exchange.source)
        except InvalidRequest as error:
            self._forget(exchange)
            raise bad_request(str(error)) from error
        except SessionClosed as error:
            raise ended() from error
        except AsyncRLError as error:
            self._forget(exchange)
            message = "the run cannot generate any more, and ends"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "run_failed", message) from error
        except asyncio.CancelledError:
            if exchange.task.cancelled() and self._closed:
                raise ended() from None
            raise
        if exchange.answer is None:
            exchange.answer = Answer.of(turn)
        return exchange.answer

    def sending(self, exchange: Exchange) -> None:
        """A client is about to get its answer: it counts from here, since the agent may end as soon as it has it."""
        exchange.arrived = True
        if exchange in self._open:
            self._open.remove(exchange)
            self._later(exchange, self._forget_if_arrived)

    def lost(self, exchange: Exchange) -> None:
        """The client has gone while it was getting its answer."""
        if not self._closed:
            exchange.arrived = False
            self._open.add(exchange)

    def part(self, exchange: Exchange) -> None:
        """A client has its answer, or has gone without it."""
        exchange.num_clients -= 1
        if exchange in self._open and not exchange.num_clients:
            self._later(exchange, self._end_if_abandoned)

    def close(self) -> None:
        """Ends what nobody has got; nothing of it is trained."""
        self._closed = True
        for exchange in (*self._open, *self._exchanges.values()):
            if exchange.timer is not None:
                # It would keep the turns of the rollout in memory.
                exchange.timer.cancel()
        for exchange in list(self._open):
            self._end(exchange)

    def _after(self, limit: LimitReached, source: str) -> Answer:
        if limit.limit == "context":
            # This conversation is too long, as for any server; others of the rollout may go on.
            message = f"This model's maximum context length is exceeded: {limit}"
            raise ApiError(HTTPStatus.BAD_REQUEST, "context_length_exceeded", message, source) from limit
        self._num_after_limit += 1
        if self._num_after_limit > NUM_LAST_ANSWERS:
            raise ApiError(HTTPStatus.BAD_REQUEST, "rollout_limit_reached", str(limit)) from limit
        return Answer.without_room()

    def _later(self, exchange: Exchange, act: Callable[[Exchange], None]) -> None:
        if exchange.timer is not None:
            exchange.timer.cancel()
        exchange.timer = asyncio.get_running_loop().call_later(RETRY_GRACE_S, act, exchange)

    def _end_if_abandoned(self, exchange: Exchange) -> None:
        if exchange in self._open and not exchange.num_clients:
            self._end(exchange)

    def _forget_if_arrived(self, exchange: Exchange) -> None:
        if exchange.arrived:
            self._forget(exchange)

    def _end(self, exchange: Exchange) -> None:
        self._forget(exchange)
        task = exchange.task
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            self._session.retract(task.result())

    def _forget(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        if self._exchanges.get(exchange.digest) is exchange:
            del self._exchanges[exchange.digest]


def ended() -> ApiError:
    return ApiError(HTTPStatus.GONE, "rollout_ended", "the rollout of this key has ended; no further turn is sampled")
