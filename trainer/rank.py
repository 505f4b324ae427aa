"""The loop's trainer on one rank: the Megatron trainer, and publishing from it to the inference pool."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain

from async_rl.config.adapter_section import AdapterSection
from async_rl.errors import AsyncRLError, LeaderFailed, RunStopped
from async_rl.loop import Window
from async_rl.method.group_proof import GroupProof
from async_rl.method.step_stats import StepStats
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Publication, WeightVersion
from async_rl.shared.protocol.inference import AdapterInfo
from async_rl.shared.protocol.sender import Content
from async_rl.shared.weights.fingerprint import Stream, base_digest
from async_rl.shared.weights.sender import AdapterSource, WeightSource
from async_rl.shared.weights.stages import StageInvitation, StageSender, StageSent, StageSource
from trainer.hf.adapter_export import AdapterExport
from trainer.hf.weight_export import WeightExport
from trainer.parallel import Parallel, address_for_ranks
from trainer.shutdown import Shutdown
from trainer.trainer import MegatronTrainer

STREAM = "stream"
INVITE = "invite"
BY_STAGE = "by stage"
SCORE = "score"
CHANGE = "change"
PUBLISHED = "published"
FAILED = "failed"
STOPPED = "stopped"
"""Messages of the main rank to the other ranks while it publishes: take part in a stream of the content that follows,
once per attempt; join the weight groups of the further senders, by the invitations that follow; send by stage; take
part in scoring the responses that follow; change the weights by the strengths that follow; continue with the
publication that follows; or end, for the reason that follows: a failure, or because the run was told to."""


class TrainingRank:
    """The loop's `Trainer`: the Megatron trainer, and publishing from it to the inference pool."""

    def __init__(
        self,
        megatron: MegatronTrainer,
        parallel: Parallel,
        run_id: str,
        publish: Callable[[WeightVersion], Publication] | None,
        shutdown: Shutdown,
        require_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        run_id: the same on every rank, and unique, so that an instance of an earlier run is never taken for an instance
            of this run.
        publish: on the main rank only: puts the weights in service as a version.
        shutdown: notifies all ranks that the run ends.
        require_lease: on the main rank only: raises Fenced if another trainer has taken over the run.
        """
        self._megatron = megatron
        self._parallel = parallel
        self._run_id = run_id
        self._publish = publish
        self._shutdown = shutdown
        self._require_lease = require_lease
        self._stage_sender = StageSender()
        self._num_publishes = 0
        self._window = ""
        """The one that is trained, for messages."""

    @property
    def dp_rank(self) -> int:
        return self._parallel.dp_rank

    @property
    def num_replicas(self) -> int:
        return self._parallel.num_replicas

    def publish_weights(self) -> Publication:
        """Moves the weights to the pool and informs every rank which instances serve them; waits for the main rank.

        Raises:
            PublishError: no instance took the weights; the other ranks raise `LeaderFailed`.
            Fenced: another trainer has taken over the run; the other ranks raise `LeaderFailed`.
            RunStopped: a rank was requested to end.
        """
        self._shutdown.synchronize(may_stop=True)
        version = f"{self._run_id}-{self._num_publishes}"
        self._num_publishes += 1
        with self._megatron.device_watch.during("making ready for a publish"):
            self._megatron.before_publish()
        publication = self._lead_publish(self._publish, version) if self._publish else self._help_to_publish()
        self._shutdown.separate()
        return publication

    def close(self) -> None:
        """Leaves the weight group of its stage, if it has one of its own."""
        self._stage_sender.leave()

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        self._shutdown.separate()
        order.watch = self._shutdown.watch
        for number, window in enumerate(self._megatron.windows(order, self._shutdown.together), start=1):
            self._shutdown.announce_stop()
            iterations = {group.iteration for groups in window for group in groups}
            self._window = f"window {number} of iteration {', '.join(map(str, iterations))}"
            yield window

    def accumulate(self, window: Window) -> list[GroupProof]:
        with self._megatron.device_watch.during(f"training of {self._window}"):
            return self._megatron.accumulate(window)

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        with self._shutdown.together():
            return self._megatron.gather(rows)

    def optimizer_step(self) -> StepStats:
        # The proof has the same result on all ranks, but the main rank may have failed to write it.
        what = self._megatron.device_watch.during(f"the optimizer step after {self._window}")
        with self._shutdown.together(), what:
            return self._megatron.optimizer_step()

    def _lead_publish(self, publish: Callable[[WeightVersion], Publication], version: WeightVersion) -> Publication:
        """The main rank's side; its sender announces what the other ranks take part in, see `weight_source`."""
        try:
            self._require_lease()
            publication = publish(version)
        except RunStopped as error:
            self._parallel.broadcast_json([STOPPED, str(error)])
            raise
        except AsyncRLError as error:
            # The other ranks wait for the next announcement.
            self._parallel.broadcast_json([FAILED, f"{type(error).__name__}: {error}"])
            raise
        finally:
            self._restore()
        self._parallel.broadcast_json([PUBLISHED, asdict(publication)])
        return publication

    def _help_to_publish(self) -> Publication:
        """The other ranks' side; they receive the main rank's failure as a message, or as a closed connection."""
        try:
            while True:
                match self._parallel.broadcast_json(None):
                    case [message, content] if message == STREAM:
                        with self._megatron.turns.weights():
                            _export_of(self._megatron, content).serve()
                    case [message, invitations] if message == INVITE:
                        export = self._megatron.export
                        if export.is_sender:
                            self._stage_sender.join(invitations[export.senders.index(self._parallel.rank) - 1])
                    case [message] if message == BY_STAGE:
                        _send_by_stage(self._megatron, self._parallel, self._stage_sender.send)
                    case [message, prompt, responses] if message == SCORE:
                        self._megatron.score(prompt, responses)
                    case [message, strengths] if message == CHANGE:
                        with self._megatron.turns.weights(changes=True):
                            self._megatron.canary_weights.change(strengths)
                    case [message, failure] if message == FAILED:
                        raise LeaderFailed(f"the main training rank failed: {failure}")
                    case [message, reason] if message == STOPPED:
                        raise RunStopped(reason)
                    case [_, publication]:
                        return Publication(**publication | {"instances": tuple(publication["instances"])})
        finally:
            self._restore()

    def _restore(self) -> None:
        """The true weights, if a canary has changed them."""
        if self._megatron.canary_weights.are_changed:
            what = self._megatron.device_watch.during("putting back the weights that a canary has changed")
            with self._megatron.turns.weights(changes=True), what:
                self._megatron.canary_weights.restore()


def adapter_info(megatron: MegatronTrainer, parallel: Parallel, section: AdapterSection) -> AdapterInfo | None:
    """What adapters that are published alone are to the base, whose digest all ranks compute together; None if they are
    published merged, and on other ranks than the main one."""
    if megatron.adapter_export is None:
        return None
    if not parallel.is_main:
        megatron.export.serve()
        return None
    assert section.rank is not None, "there are adapters"
    stream = megatron.device_watch.making("reading a tensor of the base", megatron.export.stream())
    return AdapterInfo(rank=section.rank, alpha=section.alpha, base=base_digest(stream))


def _export_of(megatron: MegatronTrainer, content: Content) -> WeightExport | AdapterExport:
    if content == "whole":
        return megatron.export
    assert megatron.adapter_export is not None, "these weights have no adapters that are published alone"
    return megatron.adapter_export


def sender_hosts(export: WeightExport, parallel: Parallel) -> list[str]:
    """An address of the host of each further sender; all ranks call it together."""
    hosts = parallel.gather_json(address_for_ranks())
    return [str(hosts[rank]) for rank in export.senders[1:]]


def _send_by_stage(
    megatron: MegatronTrainer, parallel: Parallel, send: Callable[[Stream], StageSent]
) -> list[StageSent]:
    """One stream of the whole weights, in which all ranks take part; `send` sends a part on the rank whose it is.

    Returns what each of them has sent, on all ranks.
    """
    export, sent = megatron.export, None
    with megatron.turns.weights():
        if export.is_sender:
            own = export.stream(by_stage=True)
            # Not a generator, which would be closed: other ranks give their parts of it in any case.
            stream = chain(megatron.device_watch.making("reading a tensor for a publish", own))
            sent = send(stream)
            for _ in stream:
                pass
        else:
            export.serve(by_stage=True)
    of_ranks = parallel.gather_json(None if sent is None else asdict(sent))
    return [StageSent(**each) for each in of_ranks if each is not None]


def weight_source(
    megatron: MegatronTrainer,
    parallel: Parallel,
    watch: Callable[[], None],
    adapter: AdapterInfo | None = None,
    hosts: Sequence[str] | None = None,
) -> WeightSource:
    """The main rank's weights for a publish: announces to the other ranks each operation that they take part in.

    `adapter` is what `adapter_info` returned; `hosts` is what `sender_hosts` did, if stages send their own weights.
    """

    def invite(invitations: Sequence[StageInvitation]) -> None:
        parallel.broadcast_json([INVITE, list(map(asdict, invitations))])

    def send_by_stage(send: Callable[[Stream], StageSent]) -> list[StageSent]:
        parallel.broadcast_json([BY_STAGE])
        return _send_by_stage(megatron, parallel, send)

    def stream(content: Content) -> Stream:
        parallel.broadcast_json([STREAM, content])
        with megatron.turns.weights():
            stream = _export_of(megatron, content).stream()
            yield from megatron.device_watch.making("reading a tensor for a publish", stream)

    def score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        parallel.broadcast_json([SCORE, list(prompt), list(map(list, responses))])
        with megatron.device_watch.during(f"log-probs of {len(responses)} responses for a publish"):
            return megatron.score(prompt, responses)

    def change(strengths: Mapping[str, int]) -> None:
        parallel.broadcast_json([CHANGE, dict(strengths)])
        with megatron.turns.weights(changes=True), megatron.device_watch.during("changing weights for a canary"):
            megatron.canary_weights.change(strengths)

    weights = megatron.canary_weights
    alone = None
    if adapter is not None:
        alone = AdapterSource(_export_of(megatron, "adapters").specs, partial(stream, "adapters"), adapter)
    export = megatron.export
    return WeightSource(
        export.specs,
        partial(stream, "whole"),
        score,
        change,
        weights.classes,
        weights.one_tensor,
        watch,
        adapter=alone,
        by_stage=None if hosts is None else StageSource(export.sender_of_each, hosts, invite, send_by_stage),
    )


class NoRolloutSource:
    """The rollouts of a rank that is not its replica's leader: the leader sends it the groups."""

    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: WeightVersion) -> Iterator["NoRolloutSource"]:
        yield self

    def ready(self, wait: bool) -> list[Group]:
        raise AssertionError("only a leader reads the order of training")

    def begin(self, groups: Sequence[Group]) -> None:
        raise AssertionError("only a leader reads the order of training")

    def cancel(self, indices: Collection[int]) -> None:
        raise AssertionError("only a leader selects")
