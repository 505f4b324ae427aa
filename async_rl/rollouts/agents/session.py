"""One rollout of a program in progress: it samples turns for the program, records them, and keeps to the limits.

A program reaches it through its worker (`program_runner`) or over HTTP; either calls `generate` for each turn and,
when the program has ended, `finish`. Everything runs on the producer's event loop.

    turn = await session.generate(messages=[...], tools=[...])     # or token_ids=[...]
    turn.message                                                   # what the policy said, as a chat message
    trajectory = session.finish(reward=1.0)

Who waits for what: `generate` waits for the pool. It is woken by the turn, by the end of the session (`stop` at a
limit, `close`), or by a failure of the pool, which is the run's and stands in `failed`.
"""

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import AsyncRLError, InstanceRefused
from async_rl.method.seeds import turn_seed
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Prompt, Response, WeightVersion, digest_of
from async_rl.rollouts.agents.generations import Generation, Generations
from async_rl.rollouts.agents.messages import InvalidRequest, Message, Tool
from async_rl.rollouts.agents.rendering import Renderer
from async_rl.rollouts.agents.turn import (
    Limit,
    LimitReached,
    SessionClosed,
    Turn,
    require_well_formed,
)
from async_rl.rollouts.agents.turn_limits import TurnLimits, Used, least_tokens
from async_rl.rollouts.agents.turn_tree import Conversation, TurnContext, TurnNode, TurnTree
from async_rl.rollouts.data.prompts import Tokenizer
from async_rl.rollouts.groups.sampling import ALL_TOKENS, Truncation, max_tokens_of, stops_of, turn_sampling, until_stop
from async_rl.rollouts.groups.text_executor import LONG, TextExecutor
from async_rl.rollouts.groups.trajectory import Trajectory, with_texts
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.router import Cached

__all__ = ["InvalidRequest", "LimitReached", "NothingSampled", "RolloutSession", "SessionClosed", "Sessions", "Turn"]


class NothingSampled(Exception):
    """The program ended before the policy had said anything, so there is nothing to train."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """What all sessions of a run share."""

    pool: InferencePool
    tokenizer: Tokenizer
    renderer: Renderer
    rollout: RolloutSection
    text_executor: TextExecutor = field(default_factory=TextExecutor)
    truncation: Truncation = ALL_TOKENS
    max_letters: int | None = None
    """See `max_letters_of`; with None messages of any length are rendered."""
    router_replay: bool = False
    """Whether instances report the experts of each token of a turn, and of what is before it."""


class RolloutSession:
    """The turns of one rollout of `prompt`.

    Args:
        seed: of the rollout; the seeds of its turns are derived from it.
        name: unique in the run, for the requests to instances.
        expected_tokens: of one turn.
        earlier: the session of a run of this rollout that failed: turns that were sampled there are not sampled again,
            so that the program meets the same ones, whatever the engine.
    """

    def __init__(
        self,
        shared: Sessions,
        prompt: Prompt,
        version: WeightVersion,
        seed: int,
        name: str,
        expected_tokens: float,
        earlier: "RolloutSession | None" = None,
    ) -> None:
        self._shared = shared
        self._prompt = prompt
        self._version = version
        self._seed = seed
        self._name = name
        self._expected_tokens = expected_tokens
        self._turn_tree = TurnTree(shared.renderer)
        self._delivered: WeakKeyDictionary[Turn, tuple[Generation, TurnNode]] = WeakKeyDictionary()
        self._arrived: list[TurnNode] = []
        """The delivered turns, in the order of delivery."""
        self._generations = Generations()
        self._one_by_one = asyncio.Lock()
        """Held for its work at the text_executor, which others share: one piece at a time, in the order of asking."""
        self._num_requests = itertools.count(1)
        self._num_turns = itertools.count(1)
        self._sampled: dict[tuple[Any, ...], Response] = {} if earlier is None else earlier._sampled
        self._num_faults: int = 0 if earlier is None else earlier._num_faults
        self._closed = False
        self._stopped: Limit | None = None
        self.limit: Limit | None = None
        """The first limit that it reached."""
        self.failed: asyncio.Future[AsyncRLError] = asyncio.get_running_loop().create_future()
        """Done when the pool cannot serve it, with the error that ends the run."""

    @property
    def num_turns(self) -> int:
        """Turns that were delivered."""
        return len(self._turn_tree.turns)

    @property
    def num_recorded(self) -> int:
        """Tokens of all delivered turns, and before them."""
        return self._turn_tree.num_tokens

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of the delivered turns."""
        return _num_sampled(self._arrived)

    async def generate(
        self,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        request_id: str | None = None,
        num_known: int | None = None,
    ) -> Turn:
        """Samples one turn after `messages`, or after `token_ids` as they are; cancelling it leaves nothing behind.

        Several may run at once. Temperature and the like are the run's.

        Args:
            max_tokens: of this turn, where the limits of the rollout leave so many.
            stop: texts that end the turn, besides those of the run and of the prompt's row; the tokens up to the end of
                the first one are kept.
            request_id: requests of the same id that run at the same time are one turn; without one, each is its own.
            num_known: how many turns the program had when it asked; by default all that were delivered. Their tokens
                count for the limit, which thus does not depend on which of two turns at the same time is faster.

        Raises:
            LimitReached: the rollout has no turn, token or time left.
            InvalidRequest: the request is malformed.
            SessionClosed: the rollout has ended.
            AsyncRLError: the pool cannot serve it; `failed` has it, too.
        """
        generation = self._generations.waited_for(request_id)
        if generation is None:
            self._require_room(num_known)
            async with self._one_by_one:
                generation = self._generations.waited_for(request_id)
                if generation is None:
                    request = await self._request(messages, token_ids, tools, max_tokens, stop, num_known)
                    generation = self._begin(request, tools, max_tokens, stop, request_id, num_known)
        return await self._wait_for(generation)

    def retract(self, turn: Turn) -> None:
        """Forgets a turn that could not be delivered, unless another one has continued it."""
        generation, node = self._delivered[turn]
        if not node.children:
            del self._delivered[turn]
            self._turn_tree.remove(node)
            self._arrived.remove(node)
            self._generations.forget(generation)

    def stop(self, limit: Limit) -> None:
        """Ends the rollout at a limit: what runs and what follows gets a `LimitReached`."""
        self._stopped = limit
        self._reach(limit)
        self._generations.cancel()

    def close(self) -> None:
        """Ends what is still being sampled; it is not recorded. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._generations.cancel()

    def finish(self, reward: float | None = None, turn_rewards: Sequence[float] = ()) -> Trajectory:
        """Closes the session and returns what the rollout has become; a limit makes it a truncated one.

        A session that is closed may be finished in another thread.

        Raises:
            NothingSampled: no turn was delivered.
        """
        self.close()
        turns = self._turn_tree.turns
        if not turns:
            limit = f"; it reached its limit of {self.limit}" if self.limit else ""
            raise NothingSampled(f"the program ended before a turn was generated{limit}")
        responses = with_texts(self._turn_tree.responses(self._prompt.token_ids), self._texts)
        last = replace(turns[-1].response, text=self._texts([turns[-1].response.token_ids])[0])
        return Trajectory(
            responses=responses,
            reward=reward,
            turn_rewards=tuple(turn_rewards),
            status="completed" if self.limit is None else "truncated",
            num_turns=len(turns),
            last=last,
            num_faults=self._num_faults,
        )

    async def _request(
        self,
        messages: Sequence[Message] | None,
        token_ids: Sequence[int] | None,
        tools: Sequence[Tool] | None,
        max_tokens: int | None,
        stop: Sequence[str],
        num_known: int | None,
    ) -> TurnContext:
        """What to sample after. Messages that cannot fit are refused before they are rendered."""
        shared = self._shared
        try:
            async with shared.text_executor.entered():
                self._require_room(num_known)
                require_well_formed(messages, token_ids, max_tokens, stop)
                if messages is None:
                    assert token_ids is not None, "one of both is given"
                    return TurnContext(TokenIds(token_ids))
                conversation = Conversation.of(messages, tools)
                self._allowance(least_tokens(conversation.messages, shared.max_letters), None, num_known)
                if conversation.num_bytes < LONG:
                    return self._turn_tree.request(conversation, tools)
            return await shared.text_executor.in_thread(lambda: self._turn_tree.request(conversation, tools))
        except RecursionError as error:
            raise InvalidRequest(f"messages or tools are nested too deeply: {error}") from error

    def _begin(
        self,
        request: TurnContext,
        tools: Sequence[Tool] | None,
        max_tokens: int | None,
        stop: Sequence[str],
        request_id: str | None,
        num_known: int | None,
    ) -> Generation:
        # Rendering may have taken its time.
        self._require_room(num_known)
        request = replace(request, base=self._turn_tree.base_of(request.context, self._prompt.token_ids))
        stop = tuple(dict.fromkeys((*stop, *stops_of(self._shared.rollout, self._prompt))))
        most, cut_by = self._allowance(len(request.context), max_tokens, num_known)
        digest = digest_of([array("q", request.context).tobytes()])
        number, occurrence = next(self._num_turns), self._generations.free_occurrence(digest)
        generation = Generation(number, request, digest, occurrence, most, cut_by, tools, stop, request_id)
        generation.task = asyncio.create_task(self._answer(generation), name=f"turn of {self._name}")
        self._generations.begin(generation)
        return generation

    async def _wait_for(self, generation: Generation) -> Turn:
        generation.num_waiting += 1
        try:
            response, message = await asyncio.shield(generation.task)
            self._require_going_on()
        except BaseException:
            generation.num_waiting -= 1
            if not generation.num_waiting and generation.turn is None:
                self._generations.give_up(generation)
            this_task = asyncio.current_task()
            if generation.task.cancelled() and not (this_task is not None and this_task.cancelling()):
                # The session cancelled it, not the caller.
                self._require_going_on()
            raise
        generation.num_waiting -= 1
        if generation.turn is None:
            generation.turn = self._deliver(generation, response, message)
        return generation.turn

    async def _answer(self, generation: Generation) -> tuple[Response, dict[str, Any]]:
        """What was sampled, and its message."""
        response = await self._sample(generation)
        async with self._one_by_one:
            message = await self._shared.text_executor.run(
                lambda: generation.message(response, self._shared.renderer, self._texts), len(response.token_ids)
            )
        return response, message

    async def _sample(self, generation: Generation) -> Response:
        shared, context, base = self._shared, generation.request.context, generation.request.base
        assert base is not None, "the base of a request is known when it begins"
        renders = generation.request.conversation is not None
        sampling = turn_sampling(
            shared.rollout,
            self._prompt,
            max_tokens=generation.max_tokens,
            more_stop_tokens=shared.renderer.stop_token_ids if renders else (),
            stop=generation.stop,
            seed=turn_seed(self._seed, generation.digest, generation.occurrence),
            num_continued=len(context) - len(base),
            truncation=shared.truncation,
            routed_experts=shared.router_replay,
        )
        asked = generation.digest, generation.occurrence, generation.max_tokens, generation.stop, renders, len(base)
        if asked in self._sampled:
            return self._sampled[asked]
        request_id = f"{self._name}-{next(self._num_requests)}"
        expected = min(self._expected_tokens, generation.max_tokens)
        earlier = self._turn_tree.extended_by(context)
        cached = Cached(earlier.response.instance, earlier.end) if earlier is not None else None
        try:
            (response,), attempts = await shared.pool.generate_group(
                context, sampling, request_id, self._version, expected, cached
            )
        except AsyncRLError as error:
            if isinstance(error, InstanceRefused) and not renders:
                raise InvalidRequest(f"these token_ids were refused: {error}") from error
            if not self.failed.done():
                self.failed.set_result(error)
            raise
        self._num_faults += attempts - 1
        response = until_stop(response, generation.stop, self._texts)
        self._sampled[asked] = response
        return response

    def _deliver(self, generation: Generation, response: Response, message: dict[str, Any]) -> Turn:
        """Records a turn that its program gets now."""
        self._generations.end(generation)
        if generation.cut_by is not None and response.finish_reason == "length":
            self._reach(generation.cut_by)
        turn = Turn(
            message=message,
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            finish_reason=response.finish_reason,
            prompt_token_ids=generation.request.context,
            weight_version=self._version,
        )
        node = self._turn_tree.add(generation.request, response, message, generation.number)
        self._arrived.append(node)
        self._delivered[turn] = generation, node
        return turn

    def _reach(self, limit: Limit) -> None:
        self.limit = self.limit or limit

    def _require_going_on(self) -> None:
        if self._closed:
            raise SessionClosed("the rollout has ended: its program gets no further turns")
        if self._stopped is not None:
            raise LimitReached(self._stopped, f"the rollout has reached its limit of {self._stopped}")

    def _require_room(self, num_known: int | None) -> None:
        """Before anything is rendered: a program may ask very often."""
        self._require_going_on()
        self._allowance(0, None, num_known)

    def _allowance(self, num_context: int, asked: int | None, num_known: int | None) -> tuple[int, Limit | None]:
        """How many tokens a turn may have, and the limit of the rollout that sets this number, if one does.

        Raises:
            LimitReached: none.
        """
        rollout = self._shared.rollout
        used = Used(
            turns=self.num_turns + self._generations.num_running,
            tokens=_num_sampled(self._arrived[:num_known]),
            context=num_context,
        )
        limits = TurnLimits.of(rollout, max_tokens_of(rollout, self._prompt), self._shared.pool.max_model_len)
        try:
            return limits.allowance(used, asked)
        except LimitReached as reached:
            self._reach(reached.limit)
            raise

    def _texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return self._shared.tokenizer.batch_decode(
            [list(token_ids) for token_ids in sequences], skip_special_tokens=True
        )


def _num_sampled(turns: Sequence[TurnNode]) -> int:
    return sum(len(node.response.token_ids) for node in turns)
