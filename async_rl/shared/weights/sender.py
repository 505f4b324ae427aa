"""The trainer's main rank in a publish: its weight group, the stream to it, snapshots, and log-probs of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from async_rl.config.pool_section import PublishSection
from async_rl.errors import PublishError
from async_rl.shared.net.local_address import address_towards
from async_rl.shared.protocol.adapter import adapter_fingerprint
from async_rl.shared.protocol.inference import AdapterInfo
from async_rl.shared.protocol.sender import AdapterFacts, Content, Forming, Invitations, Score, SenderFacts, Sent
from async_rl.shared.weights.changes import LastSent
from async_rl.shared.weights.collectives import SOCKETS, MemberFailed
from async_rl.shared.weights.fingerprint import Fingerprint, MakeStream, Stream, TensorSpec
from async_rl.shared.weights.ipc import ipc_backend
from async_rl.shared.weights.messages import bucket_bytes_of
from async_rl.shared.weights.nccl_version import UNKNOWN, nccl_version
from async_rl.shared.weights.rendezvous import Rendezvous, sender_address
from async_rl.shared.weights.snapshot_store import SnapshotStore
from async_rl.shared.weights.stages import StageSource, put_together, send_part
from async_rl.shared.weights.stream import WeightGroup


def _no_score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
    raise AssertionError("these weights compute nothing")


def _no_change(strengths: Mapping[str, int]) -> None:
    assert not strengths, "these weights stay as they are"


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """The adapters that are published alone; those weights of their `WeightSource` are the base."""

    specs: Sequence[TensorSpec]
    stream: MakeStream
    info: AdapterInfo


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights that a sender sends; further ranks of the trainer may take part in each of the calls."""

    specs: Sequence[TensorSpec]
    """The tensors of the stream, in its order."""
    stream: MakeStream
    """Called again if a broken group makes the rest receive it again."""
    score: Score = _no_score
    change: Callable[[Mapping[str, int]], None] = _no_change
    """Changes the weights for the canary, see `Sender.change`."""
    classes: Sequence[str] = ()
    one_tensor: Sequence[str] = ()
    watch: Callable[[], None] = lambda: None
    """See `Sender.watch`."""
    adapter: AdapterSource | None = None
    by_stage: StageSource | None = None
    """Where each pipeline stage sends its own part of the whole weights, in place of the stream."""


class WeightSender:
    """`protocol.sender.Sender` of the process that it is in, for the main thread: the weight group is on that
    thread's current device."""

    def __init__(self, source: WeightSource, config: PublishSection, run_id: str, backend: str = SOCKETS) -> None:
        """`run_id` names the snapshots of this run, which are written if `publish.snapshot_dir` is set.

        Raises:
            ConfigError: the snapshot directory cannot be created.
        """
        self._source = source
        self._config = config
        self._backend = ipc_backend(backend) if config.transport == "ipc" else backend
        self._snapshots = None if config.snapshot_dir is None else SnapshotStore(config.snapshot_dir, run_id)
        self._rendezvous: Rendezvous | None = None
        self._last = LastSent() if config.transport == "changes" else None
        self._is_changed = False
        """All weights are, for the canary: no step changes so many."""
        version = nccl_version() if self._backend == "nccl" else UNKNOWN
        self._facts = SenderFacts(
            names=[spec.name for spec in source.specs],
            dtype_names=[spec.dtype_name for spec in source.specs],
            shapes=[list(spec.shape) for spec in source.specs],
            num_bytes=sum(spec.num_bytes for spec in source.specs),
            classes=list(source.classes),
            one_tensor=list(source.one_tensor),
            nccl_version=None if version.startswith(UNKNOWN) else version,
            adapter=None if source.adapter is None else _facts_of(source.adapter),
            stages=None if source.by_stage is None else list(source.by_stage.stages),
        )

    def facts(self) -> SenderFacts:
        return self._facts

    def watch(self) -> None:
        self._source.watch()

    def form(self, hosts: Sequence[str], sizes: Sequence[int]) -> Invitations:
        self.leave_group()
        by_stage = self._source.by_stage
        routes, without = [], {}
        for host in hosts:
            try:
                routes.append(address_towards(host))
            except OSError as error:
                without[host] = str(error)
        if without:
            return Invitations([], without)
        num_stages, of_stages = 1, list[str]()
        if by_stage is not None:
            try:
                num_stages, of_stages = by_stage.num_stages, list(map(address_towards, by_stage.hosts))
            except OSError as error:
                raise PublishError(f"no route leads to the hosts of further pipeline stages: {error}") from error
        address = sender_address(self._config.master_address, routes, of_stages)
        self._rendezvous = Rendezvous(sizes, address, self._config, self._backend, num_stages=num_stages)
        if by_stage is not None:
            by_stage.invite(self._rendezvous.stage_invitations())
        return Invitations([info.model_dump() for info in self._rendezvous.invitations()], {})

    def wait_formed(self, timeout_s: float) -> Forming:
        rendezvous = self._forming
        has_ended = rendezvous.wait(timeout_s)
        return Forming(has_ended, rendezvous.problem, rendezvous.absent(), rendezvous.late(), rendezvous.lost())

    def call_off(self, without: Sequence[int]) -> str:
        problem = self._forming.call_off(without)
        self._rendezvous = None
        return problem

    def wait_accepted(self, timeout_s: float) -> list[int]:
        return self._group.wait_accepted(timeout_s)

    def send(self, version: str, content: Content) -> Sent:
        group, by_stage = self._group, self._source.by_stage
        if by_stage is not None and content == "whole":
            return put_together(by_stage.send(partial(send_part, group, self._backend)))
        # Of a group on the host it is the group's own.
        of_file = None if group.device.type == "cpu" else Fingerprint()
        try:
            stream = self._written_too(version, content, of_file)
            last = None if content == "adapters" or self._is_changed else self._last
            fingerprint = group.send(stream, bucket_bytes_of(self._backend), last)
        except PublishError as error:
            # As text and number, because its traceback would keep the broken group's connections open.
            rank = error.__cause__.rank if isinstance(error.__cause__, MemberFailed) else None
            return Sent(problem=str(error), failed=rank)
        written = fingerprint if of_file is None else of_file.hexdigest()
        return replace(self._sent(content, fingerprint, written), num_bytes=group.num_bytes_sent)

    def write_snapshot(self, version: str, content: Content) -> Sent:
        assert self._snapshots is not None, "the snapshot transport needs publish.snapshot_dir"
        specs, stream = self._of(content)
        fingerprint = self._snapshots.begin(version, specs).write(stream())
        return self._sent(content, fingerprint, fingerprint)

    def leave_group(self) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()

    def change(self, strengths: Mapping[str, int]) -> None:
        self._source.change(strengths)
        self._is_changed = bool(strengths)

    def score(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._source.score(prompt, responses)

    def close(self) -> None:
        """Leaves the weight group and removes the snapshots; may be called again."""
        self.leave_group()
        if self._snapshots is not None:
            self._snapshots.close()

    def _of(self, content: Content) -> tuple[Sequence[TensorSpec], MakeStream]:
        if content == "whole":
            return self._source.specs, self._source.stream
        assert self._source.adapter is not None, "these weights have no adapters that are published alone"
        return self._source.adapter.specs, self._source.adapter.stream

    def _written_too(self, version: str, content: Content, fingerprint: Fingerprint | None) -> Stream:
        """The stream, also written to a snapshot as it passes if there is a store; that is added to `fingerprint`."""
        specs, stream = self._of(content)
        if self._snapshots is None:
            return stream()
        return self._snapshots.begin(version, specs).tee(stream(), fingerprint)

    def _sent(self, content: Content, *fingerprints: str) -> Sent:
        """What instances find: of the stream itself, and of the snapshot that was written, if one was."""
        if content == "adapters":
            assert self._source.adapter is not None, "adapters were sent"
            info = self._source.adapter.info
            fingerprints = tuple(adapter_fingerprint(each, info.base, {info.scale}) for each in fingerprints)
        of_stream, of_file = fingerprints
        if self._snapshots is None:
            return Sent(of_stream)
        return Sent(of_stream, str(self._snapshots.commit()), of_file)

    @property
    def _forming(self) -> Rendezvous:
        assert self._rendezvous is not None, "no weight group is being formed"
        return self._rendezvous

    @property
    def _group(self) -> WeightGroup:
        group = self._forming.group
        assert group is not None, "the weight group is not formed"
        return group


def _facts_of(adapter: AdapterSource) -> AdapterFacts:
    return AdapterFacts(
        names=[spec.name for spec in adapter.specs],
        shapes=[list(spec.shape) for spec in adapter.specs],
        num_bytes=sum(spec.num_bytes for spec in adapter.specs),
        rank=adapter.info.rank,
        alpha=adapter.info.alpha,
        base=adapter.info.base,
    )
