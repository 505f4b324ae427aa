"""A gateway that listens, and rollouts of a scripted policy behind it; driven from the test's thread."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from openai import OpenAI

from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Prompt
from async_rl.parts.gateway.gateway import Access, Gateway
from async_rl.rollouts.agents.rendering import make_renderer
from async_rl.rollouts.agents.session import RolloutSession, Sessions
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from tests.support.agent_tokenizer import END, make_agent_tokenizer
from tests.support.rollout_settings import rollout_section
from tests.support.scripted_policy import Say, ScriptedPolicy

VERSION = "run-0"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def calculator(context: str, seed: int) -> str:
    """Calls the tool, and then says what it returned."""
    return f"it is {context.rpartition('tool' + chr(10))[2][0]}" if "tool\n3" in context else f"let me see{CALL}"


@dataclass
class Rollout:
    """One rollout that is served; `end` ends it."""

    rig: "GatewayRig"
    session: RolloutSession
    access: Access
    closing: ExitStack

    def end(self, reward: float | None = None) -> Trajectory:
        async def finish() -> Trajectory:
            self.closing.close()
            return self.session.finish(reward)

        return self.rig.loop.run(finish())

    def end_calculation(self) -> None:
        """Ends one whose client followed `calculator`: what this said was sampled and is trained, in one sequence."""
        trajectory = self.end(reward=1.0)
        (response,) = trajectory.responses
        texts = [f"let me see{CALL}", "it is 3"]
        said = [(*ids, END) for ids in self.rig.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        sampled = [token for ids in said for token in ids]
        assert [response.token_ids[i] for i in response.sampled] == sampled
        assert response.logprobs == tuple(-(1 + token) / 128 for token in sampled)
        assert (trajectory.num_turns, trajectory.status, trajectory.reward) == (2, "completed", 1.0)
        assert [span.version for span in response.weight_spans] == [VERSION]

    def client(self, **options: Any) -> OpenAI:
        """Closed with the rollout's gateway."""
        options = {"base_url": self.access.base_url, "api_key": "unused"} | options
        return self.rig.closing.enter_context(OpenAI(**options))

    @property
    def num_turns(self) -> int:
        return self.session.num_turns


class GatewayRig:
    def __init__(self, loop: EventLoopThread, say: Say, max_model_len: int | None = None, **settings: Any) -> None:
        self.loop = loop
        self.tokenizer = make_agent_tokenizer()
        self.policy = ScriptedPolicy(self.tokenizer, say, max_model_len)
        self.config = rollout_section(**settings)
        self.gateway = Gateway(self.config, cast(Any, self.tokenizer))
        renderer = make_renderer("template", self.tokenizer, "tiny")
        pool = cast(InferencePool, self.policy)
        self.sessions = Sessions(pool, cast(Any, self.tokenizer), renderer, self.config)
        self.rollouts: list[Rollout] = []
        self.closing = ExitStack()
        """What a test opened at the gateway, and what is closed before it."""
        loop.run(self.gateway.start())

    def open(self, seed: int = 0) -> Rollout:
        """A rollout under a key of its own."""
        name = f"rollout-{len(self.rollouts)}"

        async def begin() -> Rollout:
            session = RolloutSession(self.sessions, Prompt("0", TokenIds((3, 9)), {}), VERSION, seed, name, 10.0)
            closing = ExitStack()
            return Rollout(self, session, closing.enter_context(self.gateway.serving(session)), closing)

        rollout = self.loop.run(begin())
        self.rollouts.append(rollout)
        return rollout

    def close(self) -> None:
        self.closing.close()
        self.loop.run(self.gateway.stop())


@contextmanager
def gateway_rig(loop: EventLoopThread, say: Say, **settings: Any) -> Iterator[GatewayRig]:
    rig = GatewayRig(loop, say, **settings)
    try:
        yield rig
    finally:
        rig.close()
