"""The further stages of a trainer in one process: each sends its part of a stream from a thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from async_rl.shared.weights.fingerprint import MakeStream, Stream, TensorSpec
from async_rl.shared.weights.stages import StageInvitation, StageSender, StageSent, StageSource


class StageSenders:
    """The stages have the tensors of `specs` in turn: one after the other has the next."""

    def __init__(self, specs: Sequence[TensorSpec], make_stream: MakeStream, num_stages: int) -> None:
        self._make_stream = make_stream
        self.stage_of = {spec.name: number % num_stages for number, spec in enumerate(specs)}
        self.further = [StageSender() for _ in range(1, num_stages)]
        hosts = ["127.0.0.1"] * len(self.further)
        self.source = StageSource(list(self.stage_of.values()), hosts, self._invite, self._send)

    def close(self) -> None:
        for each in self.further:
            each.leave()

    def part(self, stage: int) -> Stream:
        return (item for item in self._make_stream() if self.stage_of[item[0].name] == stage)

    def _invite(self, invitations: Sequence[StageInvitation]) -> None:
        for each, invitation in zip(self.further, invitations, strict=True):
            each.join(asdict(invitation))

    def _send(self, send: Callable[[Stream], StageSent]) -> list[StageSent]:
        with ThreadPoolExecutor(len(self.further)) as threads:
            sent = [threads.submit(each.send, self.part(stage)) for stage, each in enumerate(self.further, start=1)]
            return [send(self.part(0)), *(each.result() for each in sent)]
