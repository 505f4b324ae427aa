"""What the producer does for a run, by the names of the main rank's calls; built in the order of its methods.

`rest` where the pools take turns, `load`, then `open`, then as often as the trainer asks `publish`, `write_groups`,
`end_iteration`, `members`, `evaluate_trained`. The calls run in the main thread, one at a time; everything asynchronous
runs on the event loop.
"""

import asyncio
import gc
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.recorder import EvaluationRecorder
from async_rl.evaluation.sets import load_sets
from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.gap_limits import noise_limits, noise_scale
from async_rl.method.types import Batch, Group, Prompt, Publication
from async_rl.producer.batch_rollout import BatchRollout, BatchStarts
from async_rl.producer.client import MAX_IDLE_WORK_S, publication_of
from async_rl.producer.dock import Docking
from async_rl.producer.frames import Carry, Message
from async_rl.producer.rest import Rest
from async_rl.records.recorder import IterationRecord, RunRecorder
from async_rl.records.records import ROLLOUTS
from async_rl.records.samples import NUM_GROUPS, FirstGroups
from async_rl.records.throughput import ModelSize, TrainingPool
from async_rl.records.timeline import GroupTimes
from async_rl.records.trackers.choice import open_trackers
from async_rl.rollouts.agents.program_rollouts import make_group_maker
from async_rl.rollouts.data.prompts import PromptSource, Tokenizer
from async_rl.rollouts.fleet.dns import DnsMembership
from async_rl.rollouts.fleet.orders import ORDERS_FILE, Orders
from async_rl.rollouts.fleet.server import FleetServer
from async_rl.rollouts.groups.group_maker import GroupMaker
from async_rl.rollouts.groups.prompt_length import require_len
from async_rl.rollouts.nodes.maker import WithNodes
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.admission import Admission
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.probe import Probe
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.rollouts.publish.remote_sender import RemoteSender
from async_rl.rollouts.rewards import Reward, make_reward
from async_rl.rollouts.rewards.readable_answers import answer_check
from async_rl.rollouts.tokenizer import load_tokenizer
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.files import append_lines

START_TIMEOUT_S = 600.0
"""For starting the processes of a reward or a program, which have limits of their own: that of anything beyond."""

PORT_PATIENCE_S = 5.0
"""For the port of the fleet endpoint, which was free while the producer was replaced."""

PORT_POLL_S = 0.1

CLOSE_TIMEOUT_S = 30.0
"""For ending them."""

log = logging.getLogger(__name__)


class ProducerService:
    """
    Args:
        closing: closes what is opened, in reverse order.
        pool: of the run; by default made from the config.
        lease_name: `RUN_UID:TERM`, as instances are told; `run` is the uid.
        require_lease: raises if another trainer writes the records by now.
    """

    def __init__(
        self,
        closing: ExitStack,
        config: Config,
        loop: EventLoopThread,
        *,
        token: str | None = None,
        lease_name: str | None = None,
        run: str | None = None,
        require_lease: Callable[[], None] = lambda: None,
        pool: InferencePool | None = None,
    ) -> None:
        self._closing = closing
        self._config = config
        self._loop = loop
        self._token = token
        self._run = run
        self._takes_turns = config.run.placement == "turns"
        self._require_lease = require_lease
        self._pool = pool or InferencePool(config.pool, token, lease_name, takes_turns=self._takes_turns)
        self._rest = Rest(self._pool, config.run.dir, config.publish.timeout_s)
        closing.callback(lambda: loop.run_closing(self._pool.close()))
        self._tokenizer: Tokenizer
        self._reward: Reward
        self._prompts: PromptSource
        self._maker: GroupMaker
        self._recorder: RunRecorder
        self._publisher: Publisher | None = None
        self._evaluator: Evaluator | None = None
        self._docking = Docking()
        self._batches = BatchStarts()
        self._rolled_out: list[tuple[float, float]] = []
        """When each group of the batch was begun and finished."""
        self._samples = FirstGroups(NUM_GROUPS + config.prompts.reserve)

    # Calls

    def rest(self) -> None:
        """Has instances leave the devices to the trainer, which is about to load."""
        self._loop.run(self._rest.begin())
        log.info("no instance has the devices: the trainer loads")

    def load(self, checkpoint: str, cache_dir: str) -> dict[str, Any]:
        """Tokenizer, reward and prompts; returns the names of the prompts and digests of the data.

        Raises:
            ConfigError: one of them is not usable.
            WriteFailed: there is no room for the tokenized prompts.
        """
        config = self._config
        self._reward = make_reward(config.reward)
        self._tokenizer, self._pool.model_tokens = load_tokenizer(config.model.path, checkpoint)
        check = answer_check(config.reward)
        self._prompts = PromptSource.load(config.prompts, self._tokenizer, config.run.seed, Path(cache_dir), check)
        self._config = config.with_iterations(len(self._prompts))
        return {"outlines": list(map(asdict, self._prompts.outlines)), "digests": self._prompts.digests}

    def open(
        self,
        first_iteration: int,
        num_replicas: int,
        training_pool: Mapping[str, Any],
        cuts_groups: bool = False,
        fleet_port: int | None = None,
    ) -> int:
        """Opens the fleet endpoint, waits for the instances, and starts reward, programs and evaluator; returns the
        port of the endpoint.

        Args:
            cuts_groups: whether replicas may train a long group in pieces.
            fleet_port: that of the producer before this one; None, that of `pool.fleet_address`.

        Raises:
            ConfigError: an address is not available, or a reward, a program, a set or the longest prompt is not usable.
            NoInstanceLeft: no instance became healthy within `pool.timeout_s`.
        """
        config, pool, loop = self._config, self._pool, self._loop
        self._docking = Docking.of(config, num_replicas, cuts=cuts_groups)
        orders = Orders(pool, config.run.dir / ORDERS_FILE, self._run or "", config.pool.instances)
        orders.repeat()
        server = self._start_fleet(orders, fleet_port)
        for name in config.pool.dns_names:
            self._start(DnsMembership(pool, name, orders=orders))
        loop.run(pool.wait_until_ready())
        pool.min_model_len = require_len(config.rollout, self._prompts.longest, pool.max_model_len)
        self._maker = make_group_maker(config, pool, self._tokenizer, self._reward, config.publish.master_address)
        if config.pipeline.nodes:
            self._maker = WithNodes(self._maker, config.pipeline.nodes)
        trackers = open_trackers(config.tracking, config.run.dir, first_iteration, config.model_dump(mode="json"))
        self._closing.callback(trackers.close)
        self._evaluator = self._make_evaluator(EvaluationRecorder(config.run.dir, self._require_lease, trackers))
        self._closing.callback(lambda: loop.run_closing(self._maker.close(), CLOSE_TIMEOUT_S))
        loop.run(self._maker.start(), START_TIMEOUT_S)
        # Collections of garbage stop all rollouts: what has been made until now stays, and is not looked at again.
        gc.freeze()
        self._recorder = RunRecorder(
            config.run.dir,
            config.train.num_iterations,
            server.metrics.record_iteration,
            self._reward.correct_at,
            self._decode,
            self._require_lease,
            has_reserve=config.prompts.reserve > 0,
            training_pool=_training_pool(training_pool),
            trackers=trackers,
            all_responses=config.tracking.all_responses,
            takes_turns=self._takes_turns,
        )
        self._closing.callback(self._recorder.close)
        return server.port

    def publish(self, version: str, ask: Carry) -> Publication:
        """Puts the trainer's weights in service as `version`; `ask` has its main rank send them.

        Raises:
            PublishError: no instance received them.
        """
        if self._publisher is None:
            self._publisher = self._make_publisher(RemoteSender(ask))
        return self._publisher.publish(version)

    def write_groups(self, iteration: int, times: Sequence[Mapping[str, Any]], rows: Sequence[Any]) -> None:
        """Writes the groups of a mini-batch."""
        record = IterationRecord(iteration)
        record.times = {each["index"]: GroupTimes(**each) for each in times}
        self._recorder.write_groups(record, list(map(GroupProof.from_json, rows)))

    def end_iteration(self, record: Mapping[str, Any], publication: Mapping[str, Any]) -> None:
        whole = IterationRecord.from_data(record, self._samples, self._rolled_out)
        self._recorder.end_iteration(whole, publication_of(publication))

    def members(self) -> list[tuple[str, str | None]]:
        """URL of each instance, and why it is out of service."""
        return [(member.url, member.reason) for member in self._pool.members]

    def evaluate_trained(self, version: str) -> None:
        """Evaluates the trained weights, which the pool serves as `version`, and waits for that.

        Raises:
            WaitTimedOut: it took longer than `MAX_IDLE_WORK_S`.
        """

        async def evaluate(evaluator: Evaluator) -> None:
            evaluator.note_awaited()
            await evaluator.evaluate(self._config.train.num_iterations, version)

        if self._evaluator is not None:
            self._loop.run(evaluate(self._evaluator), MAX_IDLE_WORK_S)

    # Rollouts, on the event loop

    async def start_batch(self, replica: int, message: Message) -> BatchRollout:
        """The running batch that a replica's message asks for.

        Raises:
            ConfigError: there is no prompt of such a name.
        """
        return await self._batches.of(replica, message["start"], partial(self._start_batch, message))

    async def _start_batch(self, message: Message) -> BatchRollout:
        iteration, self._rolled_out = message["start"], []
        # Rows are read from disk: the loop goes on meanwhile.
        parts = await asyncio.to_thread(lambda: list(map(self._find, message["mini_batches"])))
        return BatchRollout(
            self._maker,
            [Batch(iteration, prompts, message["first_reserve"]) for prompts in parts],
            message["version"],
            self._docking,
            self._evaluator,
            self._note_group,
            self._write_figures,
            rest=self._rest.begin if self._takes_turns else None,
        )

    def _find(self, prompts: Sequence[tuple[int, str]]) -> dict[int, Prompt]:
        return {index: self._prompts.find(prompt_id) for index, prompt_id in prompts}

    def _note_group(self, group: Group) -> None:
        self._samples.offer(group)
        self._rolled_out.append((group.started_s, group.finished_s))

    def _write_figures(self, figures: Mapping[str, Any]) -> None:
        self._require_lease()
        append_lines(self._config.run.dir / ROLLOUTS, [json.dumps(figures)])

    # Parts

    def _make_evaluator(self, recorder: EvaluationRecorder) -> Evaluator | None:
        config = self._config
        if not config.evaluation.sets:
            return None
        sets = load_sets(
            config.evaluation,
            config.prompts,
            self._tokenizer,
            config.run.seed,
            self._prompts.held_out,
            answer_check(config.reward),
        )
        evaluator = Evaluator(self._pool, self._maker, self._reward, sets, config.evaluation, recorder.write)
        if evaluator.longest is not None:
            require_len(config.rollout, evaluator.longest, self._pool.max_model_len)
        return evaluator

    def _make_publisher(self, sender: RemoteSender) -> Publisher:
        config, prompt = self._config, self._prompts.longest.token_ids
        admission = probe = canary = None
        if config.publish.canary != "off":
            noise, dtype = noise_limits(config.train, config.model.dtype).noise, config.model.dtype
            if not self._takes_turns:
                # The trainer could not compute beside the instances; the batch's own log-probs show the same.
                probe = Probe(config.publish, config.rollout, prompt, noise)
            canary = Canary(
                config.publish,
                config.rollout,
                prompt,
                noise,
                dtype,
                rounding=noise_scale(dtype),
                exact=config.train.exact,
            )
        if config.publish.snapshot_dir is not None:
            admission = Admission(config.publish, takes_turns=self._takes_turns)
            admission.canary = canary
            self._pool.late_joiners.admit = admission.admit
        return Publisher(
            self._pool,
            self._loop,
            config.publish,
            sender,
            wait_s=config.pool.timeout_s,
            admission=admission,
            probe=probe,
            canary=canary,
            takes_turns=self._takes_turns,
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.batch_decode([list(token_ids)], skip_special_tokens=False)[0]

    def _start_fleet(self, orders: Orders, port: int | None) -> FleetServer:
        """The fleet endpoint, at the port of the producer before this one, if there was one and it can be had.

        Raises:
            ConfigError: its address cannot be used.
        """
        config = self._config
        deadline = time.monotonic() + PORT_PATIENCE_S
        while True:
            pool = config.pool if port is None else config.pool.with_fleet_port(port)
            server = FleetServer(
                self._pool, pool, self._token, config.run.dir, config.publish.master_address, self._run, orders
            )
            try:
                self._start(server)
                return server
            except ConfigError as error:
                if port is None:
                    raise
                if time.monotonic() > deadline:
                    log.warning("%s; instances that were told its URL do not find it any more", error)
                    port = None
            time.sleep(PORT_POLL_S)

    def _start(self, part: FleetServer | DnsMembership) -> None:
        self._loop.run(part.start())
        self._closing.callback(lambda: self._loop.run_closing(part.stop()))


def _training_pool(data: Mapping[str, Any]) -> TrainingPool:
    model = data["model"]
    return TrainingPool(**{**data, "model": None if model is None else ModelSize(**model)})
