"""What the control side of a publish asks of the trainer's main rank, which sends the weights and computes with them.

`rollouts/publish/` asks, without torch, and `weights.sender.WeightSender` answers, in the trainer. Arguments
and results are plain data, so that a call can go through a connection (`publish/remote_sender.py`). Instances are
named by their hosts, and by the ranks of their workers in the weight group: the trainer is rank 0, and the workers of
one instance after the other follow it, in the order in which `form` got the instances.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

ALL_STRENGTHS = 3
"""The largest strength of a class's change; 1 is the smallest."""

CONSTANT = -1
"""In place of a strength: all values of a tensor are the same."""

SCALE = "scale"
"""In place of a class of adapters' factors: what they add, in percent of what it is."""

ALIKE = ("ranks alike", "layers alike", "values alike")
"""Beside classes of adapters' factors: those that are changed are the same in all ranks, all layers, or all values."""

Content = Literal["whole", "adapters"]
"""Of a stream: all weights of the model, without adapters where these are published alone; or the adapters."""

Score = Callable[[Sequence[int], Sequence[Sequence[int]]], list[list[float]]]
"""(prompt, token ids of each response) -> the trainer's log-probs of each response's tokens, after temperature."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The adapters that are published alone: their tensors in the order of their stream."""

    names: list[str]
    shapes: list[list[int]]
    """All are float32."""
    num_bytes: int
    rank: int
    alpha: float
    base: str
    """Digest of the weights below them."""


@dataclass(frozen=True, slots=True)
class SenderFacts:
    """What does not change while a sender lives: the tensors of its stream in their order, and how it sends them.

    With `adapter` a publish is one of adapters alone, and the other tensors are those of the base."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    num_bytes: int
    """Of all tensors together."""
    classes: list[str]
    """Of the tensors, for the canary; the later ones still show in log-probs where the earlier ones are constant."""
    one_tensor: list[str]
    """Classes that are sent as one tensor, but may be two copies in an engine."""
    nccl_version: str | None
    """As `async_rl.shared.weights.nccl_version` has it; None if the weights are not sent by NCCL, or there is none."""
    adapter: AdapterFacts | None = None
    stages: list[int] | None = None
    """The pipeline stage that sends each tensor, where each sends its own; otherwise the main rank sends all."""


@dataclass(frozen=True, slots=True)
class Invitations:
    """Either fields of `protocol.inference.InitInfo`, for each instance; or why none is invited."""

    infos: list[dict[str, Any]]
    without_route: dict[str, str]
    """Hosts to which no route leads -> the system's error."""


@dataclass(frozen=True, slots=True)
class Forming:
    """How the forming of a weight group stands."""

    has_ended: bool
    problem: str | None
    """Why it has ended without a group."""
    absent: list[int]
    """Ranks that have not come yet. One that has come counts as present also after its end."""
    late: list[int]
    """Ranks that came when another member had come and gone, or the sender had given up."""
    lost: list[int]
    """Ranks that have come and ended their connection, the first one first."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A stream that was sent or written; or `problem`: why the group broke."""

    fingerprint: str = ""
    snapshot: str | None = None
    """The file in which it is, too."""
    snapshot_fingerprint: str = ""
    """What an instance finds that reads the file: another one than the stream's, if that was sent between devices."""
    problem: str | None = None
    failed: int | None = None
    """The rank that the problem is of, where the sender knows it."""
    num_bytes: int | None = None
    """That went to each instance; None of a stream that was written only."""


class Sender(Protocol):
    """The trainer's main rank in a publish; one call at a time, each waits for its result.

    A sender has one weight group at most: `form` begins one, `send` keeps it, anything that failed is followed by
    `call_off` or `leave_group`.
    """

    def facts(self) -> SenderFacts: ...

    def watch(self) -> None:
        """Asked regularly while a publish waits for an instance.

        Raises:
            RunStopped, LeaderFailed: the run has to end.
        """
        ...

    def form(self, hosts: Sequence[str], sizes: Sequence[int]) -> Invitations:
        """Begins to form a weight group with instances on these hosts, with so many workers each.

        Raises:
            PublishError: this host cannot be reached at `publish.master_address`.
        """
        ...

    def wait_formed(self, timeout_s: float) -> Forming:
        """Waits until the forming has ended, at most `timeout_s`."""
        ...

    def call_off(self, without: Sequence[int]) -> str:
        """Ends the forming for all members, because it failed or the ranks `without` will not come; returns why."""
        ...

    def wait_accepted(self, timeout_s: float) -> list[int]:
        """Waits until all ranks have accepted the stream's list of tensors, at most `timeout_s`; returns the others."""
        ...

    def send(self, version: str, content: Content) -> Sent:
        """Broadcasts a stream to all ranks, which have accepted it; if there are snapshots, also writes that of
        `version`.

        Raises:
            ConfigError: the snapshot cannot be written.
        """
        ...

    def write_snapshot(self, version: str, content: Content) -> Sent:
        """Writes a stream to the snapshot of `version`.

        Raises:
            ConfigError: it cannot be written.
        """
        ...

    def leave_group(self) -> None:
        """Ends the weight group, if there is one; the instances notice, at the latest with their next update."""
        ...

    def change(self, strengths: Mapping[str, int]) -> None:
        """Changes classes of the weights, by a strength or to `CONSTANT`; those left out have their true values.

        Of adapters also all in what a name such as "model.layers.0" begins: to `CONSTANT`, which adds nothing.
        """
        ...

    def score(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each response's tokens under the weights as they are, after temperature."""
        ...
