"""A patch of vLLM (0.32), whose executor of several workers stops reading at the first answer that is an error.

The answers of the other workers stay in their queues, and each later call takes the one of the call before from them:
after one weight update that failed, fingerprints never agree again. It can go once `MultiprocExecutor.collective_rpc`
reads all answers to a call before it raises.
"""

from collections.abc import Iterator, Sequence
from typing import Any


class AnswerQueues(Sequence[Any]):
    """The queues of all workers' answers; one of them, of a call that one worker answers, is as it was."""

    def __init__(self, queues: Sequence[Any]) -> None:
        self._queues = queues

    def __getitem__(self, rank: Any) -> Any:
        return self._queues[rank]

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Any]:
        """For the answers of all workers to one call."""
        answers: list[Any] = []
        return iter([_OneOfAll(self._queues, rank, answers) for rank in range(len(self))])


class _OneOfAll:
    def __init__(self, queues: Sequence[Any], rank: int, answers: list[Any]) -> None:
        self._queues, self._rank, self._answers = queues, rank, answers

    def dequeue(self, **how: Any) -> Any:
        """The answer of one worker, once those of all are read; earlier releases pass more than a timeout."""
        while len(self._answers) < len(self._queues):
            self._answers.append(self._queues[len(self._answers)].dequeue(**how))
        return self._answers[self._rank]


def read_all_answers(executor: type) -> None:
    """Has vLLM's class `MultiprocExecutor` read the answers of all workers to a call, whatever the first one is."""
    call = executor.collective_rpc  # type: ignore[attr-defined]

    def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
        queues = self.response_mqs
        self.response_mqs = AnswerQueues(queues)
        try:
            return call(self, *args, **kwargs)
        finally:
            self.response_mqs = queues

    executor.collective_rpc = collective_rpc  # type: ignore[attr-defined]
