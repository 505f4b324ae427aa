"""Algorithm 1 on scripted parts: what is called when, and what stops the step."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_rl.config.train_section import TrainSection
from async_rl.errors import OnPolicyViolation, ProducerLost, RewardError
from async_rl.loop import Window, train
from async_rl.method.group_proof import GroupProof
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.step_stats import StepStats
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Prompt, Publication
from async_rl.records.recorder import IterationRecord, Recorder, RunRecorder
from async_rl.records.rotation import TIMELINE
from tests.support.groups import make_group, make_response
from tests.support.rotated_rows import rotated_rows

NUM_PROMPTS = 4
LIMITS = NoiseLimits(1.0)


def group_of(index: int, version: str, iteration: int = 0) -> Group:
    prompt = Prompt(f"row-{index}", (3, 4), {})
    return make_group(index, [make_response(version=version)] * 2, prompt=prompt, version=version, iteration=iteration)


class ScriptedTrainer:
    """Notes every call; `dp_rank` 0 of 1."""

    dp_rank = 0
    num_replicas = 1

    def __init__(self) -> None:
        self.calls: list[str] = []

    def publish_weights(self) -> Publication:
        number = sum(call.startswith("publish") for call in self.calls)
        self.calls.append(f"publish {number}")
        return Publication(f"v{number}", "f", ("http://a",), 8, 0.0)

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        while groups := order.next_groups(wait=True):
            yield from ([[group]] for group in groups)

    def accumulate(self, window: Window) -> list[GroupProof]:
        groups = [group for micro_batch in window for group in micro_batch]
        self.calls += [f"train {group.index}" for group in groups]
        return [
            GroupProof.of(group, gaps={group.responses[0].instance: LogprobGaps(group.num_response_tokens)})
            for group in groups
        ]

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        return list(rows)

    def optimizer_step(self) -> StepStats:
        self.calls.append("step")
        return StepStats(loss=0.5, grad_norm=1.0, learning_rate=1e-3, metrics={"kl": 0.25})


class Prompts:
    def batch(self, iteration: int) -> Batch:
        return Batch(iteration, {i: Prompt(f"row-{i}", (3, 4), {}) for i in range(NUM_PROMPTS)})


class OneByOne:
    """Groups that finish one after the other; those of a later mini-batch wait for it, as at the producer."""

    def __init__(self, groups: Iterator[Group], mini_batches: Sequence[Batch]) -> None:
        self._groups = groups
        self._mini_batches = [part.prompts.keys() for part in mini_batches]
        self._held: list[Group] = []

    def ready(self, wait: bool) -> list[Group]:
        if not wait:
            return []
        later = {index for indices in self._mini_batches[1:] for index in indices}
        while (group := self._next(later)) is not None and group.index in later:
            self._held.append(group)
        if group is None:
            self._mini_batches.pop(0)
        return [] if group is None else [group]

    def _next(self, later: set[int]) -> Group | None:
        for number, group in enumerate(self._held):
            if group.index not in later:
                return self._held.pop(number)
        return next(self._groups, None)

    def begin(self, groups: Sequence[Group]) -> None:
        pass

    def cancel(self, indices: Collection[int]) -> None:
        raise AssertionError("nothing is selected")


class ScriptedRollouts:
    """Finishes groups in a given order; notes when each was handed over."""

    def __init__(self, calls: list[str], order: Sequence[int], version: str | None = None) -> None:
        self.calls = calls
        self.order = order
        self.version = version
        self.closed = False

    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: str) -> Iterator[OneByOne]:
        def groups() -> Iterator[Group]:
            for index in self.order:
                self.calls.append(f"finish {index}")
                yield group_of(index, self.version or version, mini_batches[0].iteration)

        try:
            yield OneByOne(groups(), mini_batches)
        finally:
            self.closed = True


def run(
    tmp_path: Path,
    order: Sequence[int] = (2, 0, 3, 1),
    train_order: str = "completion",
    steps_per_batch: int = 1,
) -> list[str]:
    trainer = ScriptedTrainer()
    train(
        TrainSection.model_validate({"iterations": 1, "order": train_order, "steps_per_batch": steps_per_batch}),
        trainer,
        Prompts(),
        ScriptedRollouts(trainer.calls, order),
        Ledger(tmp_path / "ledger.jsonl", 2, LIMITS),
        RunRecorder(tmp_path, iterations=1, correct_at=1.0),
    )
    return trainer.calls


def test_periodic_training_starts_at_the_first_finished_group(tmp_path: Path) -> None:
    calls = run(tmp_path)
    assert calls == [
        "publish 0",
        *("finish 2", "train 2", "finish 0", "train 0", "finish 3", "train 3", "finish 1", "train 1"),
        "step",
    ]


def test_prompt_order_trains_each_group_as_soon_as_its_turn_comes(tmp_path: Path) -> None:
    calls = run(tmp_path, order=(1, 0, 3, 2), train_order="prompt")
    assert calls[1:-1] == [
        *("finish 1", "finish 0", "train 0", "train 1"),
        *("finish 3", "finish 2", "train 2", "train 3"),
    ]


def test_prompt_order_keeps_groups_that_belong_to_no_place(tmp_path: Path) -> None:
    batch = Prompts().batch(0)
    groups = OneByOne((group_of(index, "v0") for index in (9, 1, 0, 3, 2)), [batch])
    order = TrainingOrder(groups, TrainSection(iterations=1, order="prompt"), [batch])
    order.begin_mini_batch()
    trained: list[int] = []
    while ready := order.next_groups(wait=True):
        trained += [group.index for group in ready]
    assert trained == [0, 1, 2, 3, 9]


def test_every_step_trains_the_prompts_of_its_mini_batch_whatever_finishes_first(tmp_path: Path) -> None:
    calls = run(tmp_path, order=(3, 1, 2, 0), steps_per_batch=2)
    assert calls[1:] == [
        *("finish 3", "finish 1", "train 1", "finish 2", "finish 0", "train 0", "step"),
        *("train 3", "train 2", "step"),
    ]
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [record["prompt_ids"] for record in records] == [["row-0", "row-1"], ["row-2", "row-3"]]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["num_groups"] == NUM_PROMPTS


def test_each_complete_iteration_is_announced(tmp_path: Path) -> None:
    trainer, seen = ScriptedTrainer(), []
    train(
        TrainSection(iterations=3),
        trainer,
        Prompts(),
        ScriptedRollouts(trainer.calls, (0, 1, 2, 3)),
        Ledger(None, 2, LIMITS),
        Recorder(),
        first_iteration=1,
        after_iteration=lambda iteration: seen.append((iteration, trainer.calls.count("step"))),
    )
    assert seen == [(1, 1), (2, 2)]


def test_weights_move_once_per_iteration(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    train(
        TrainSection(iterations=3),
        trainer,
        Prompts(),
        ScriptedRollouts(trainer.calls, (0, 1, 2, 3)),
        Ledger(None, 2, LIMITS),
        Recorder(),
    )
    assert [c for c in trainer.calls if c.startswith(("publish", "step"))] == [
        *("publish 0", "step", "publish 1", "step", "publish 2", "step")
    ]


@pytest.mark.parametrize(("order", "version"), [((0, 1, 2), None), ((0, 1, 2, 3, 3), None), ((0, 1, 2, 3), "v9")])
def test_no_step_without_the_proof(tmp_path: Path, order: Sequence[int], version: str | None) -> None:
    trainer = ScriptedTrainer()
    rollouts = ScriptedRollouts(trainer.calls, order, version)
    with pytest.raises(OnPolicyViolation):
        train(TrainSection(iterations=1), trainer, Prompts(), rollouts, Ledger(None, 2, LIMITS), Recorder())
    assert "step" not in trainer.calls


def test_a_failing_producer_ends_the_run_and_is_closed(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()

    class Failing(ScriptedRollouts):
        @contextmanager
        def start(self, mini_batches: Sequence[Batch], version: str) -> Iterator[OneByOne]:
            def groups() -> Iterator[Group]:
                yield group_of(0, version)
                raise RewardError("reward 'math' raised on prompt 'row-1'")

            try:
                yield OneByOne(groups(), mini_batches)
            finally:
                self.closed = True

    rollouts = Failing(trainer.calls, ())
    with pytest.raises(RewardError, match="row-1"):
        train(TrainSection(iterations=1), trainer, Prompts(), rollouts, Ledger(None, 2, LIMITS), Recorder())
    assert rollouts.closed
    assert "step" not in trainer.calls


def test_each_iteration_leaves_one_record(tmp_path: Path) -> None:
    run(tmp_path)
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["iteration"] == 0
    assert record["reward_mean"] == 0.5
    assert record["accuracy"] == 0.5
    assert record["kl"] == 0.25
    assert record["response_tokens"] == NUM_PROMPTS * 4
    groups = list(rotated_rows(TIMELINE, tmp_path))
    assert [row["index"] for row in groups] == [0, 1, 2, 3], "in the order of places"
    trained = sorted(groups, key=lambda row: row["train_started_s"])
    assert [row["index"] for row in trained] == [2, 0, 3, 1]
    assert record["seconds"] >= record["train_s"] + record["wait_s"]


class Losing(Recorder):
    """The producer is lost where `at` says; notes what it keeps."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.kept: list[int] = []

    def write_groups(self, record: IterationRecord, rows: Sequence[GroupProof]) -> None:
        if self.at == "proof" and record.iteration == 1:
            raise ProducerLost("gone")

    def end_iteration(self, record: IterationRecord, publication: Publication) -> None:
        if self.at == "record" and record.iteration == 1:
            raise ProducerLost("gone")

    def keep_unwritten(self, record: IterationRecord, publication: Publication) -> None:
        self.kept.append(record.iteration)


class LosingRollouts(ScriptedRollouts):
    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: str) -> Iterator[OneByOne]:
        with super().start(mini_batches, version) as groups:
            yield groups
        if mini_batches[0].iteration == 1:
            raise ProducerLost("gone")


@pytest.mark.parametrize(("at", "num_whole"), [("proof", 1), ("leaving", 2), ("record", 2)])
def test_an_iteration_whose_steps_were_taken_is_whole_though_its_producer_is_lost(at: str, num_whole: int) -> None:
    trainer, recorder = ScriptedTrainer(), Losing(at)
    rollouts = (LosingRollouts if at == "leaving" else ScriptedRollouts)(trainer.calls, (0, 1, 2, 3))
    whole: list[int] = []
    with pytest.raises(ProducerLost):
        train(
            TrainSection(iterations=3),
            trainer,
            Prompts(),
            rollouts,
            Ledger(None, 2, LIMITS),
            recorder,
            after_iteration=whole.append,
        )
    assert whole == list(range(num_whole)) and recorder.kept == ([] if at == "proof" else [1])
    assert trainer.calls.count("step") == num_whole
