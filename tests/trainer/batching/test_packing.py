"""Groups into micro-batches and windows: nothing is lost, nothing waits that need not, and bounds hold."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from async_rl.config.train_section import TrainSection
from async_rl.method.pieces import cut
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Prompt
from tests.support.groups import random_group
from trainer.batching.group_slice import GroupSlice, num_rows, slices_of, split_slice
from trainer.batching.packing import pack, pack_windows
from trainer.forward_backward import PackedPass, TwoStagePass, make_passes
from trainer.parallel import Parallel


def split(group: Group, max_tokens: int, with_prompt: bool) -> list[GroupSlice]:
    (whole,) = slices_of([group])
    return split_slice(whole, max_tokens, with_prompt=with_prompt)


class Scripted:
    """Groups that arrive in given bursts, one burst per question."""

    def __init__(self, *bursts: list[Group]) -> None:
        self.bursts = list(bursts)

    def ready(self, wait: bool) -> list[Group]:
        while wait and self.bursts and not self.bursts[0]:
            self.bursts.pop(0)
        return self.bursts.pop(0) if self.bursts else []

    def begin(self, groups: Sequence[Group]) -> None:
        pass


def order_of(source: Scripted, order: str, size: int) -> TrainingOrder:
    batch = Batch(0, {i: Prompt(f"p{i}", (3,), {}) for i in range(size)})
    training = TrainingOrder(source, TrainSection(iterations=1, order=order), [batch])
    training.begin_mini_batch()
    return training


def indexes(window: list[list[Group]]) -> list[list[int]]:
    return [[group.index for group in micro_batch] for micro_batch in window]


def test_micro_batches_hold_whole_groups_up_to_the_bound() -> None:
    groups = [random_group(i, 4, lens) for i, lens in enumerate([(3, 3), (5,), (9, 9), (2,), (2,)])]
    assert [num_rows(group) for group in groups] == [8, 8, 20, 5, 5]
    assert indexes(pack(groups, 16)) == [[0, 1], [2], [3, 4]]


@pytest.mark.parametrize("whole_backlog", [False, True])
@pytest.mark.parametrize("order", ["completion", "prompt"])
def test_windows_hold_every_group_once_whatever_arrives_when(order: str, whole_backlog: bool) -> None:
    rng = random.Random()
    for _ in range(50):
        groups = [random_group(i, rng.randint(1, 9), (rng.randint(1, 9), rng.randint(1, 9))) for i in range(12)]
        shuffled = rng.sample(groups, len(groups))
        cuts = sorted(rng.randrange(13) for _ in range(5))
        bursts = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
        windows = list(pack_windows(order_of(Scripted(*bursts), order, 12), 30, whole_backlog))
        trained = [index for window in windows for micro_batch in indexes(window) for index in micro_batch]
        assert sorted(trained) == list(range(12))
        if order == "prompt":
            assert trained == list(range(12))
            assert [m for w in windows for m in indexes(w)] == indexes(pack(groups, 30))
        for micro_batch in (micro_batch for window in windows for micro_batch in window):
            assert sum(map(num_rows, micro_batch)) <= 30
        assert whole_backlog or all(len(window) == 1 for window in windows)


def test_by_index_pieces_of_others_come_last_and_by_themselves_whatever_arrives_when() -> None:
    rng = random.Random()
    batch = Batch(0, {i: Prompt(f"p{i}", (3,), {}) for i in range(12)})
    for _ in range(50):
        groups = [random_group(i, rng.randint(1, 9), (rng.randint(1, 9), rng.randint(1, 9))) for i in range(12)]
        own, others = groups[::2], [cut(group, 1)[1] for group in groups[1::2]]
        shuffled = rng.sample([*own, *others], len(groups))
        bounds = sorted(rng.randrange(13) for _ in range(5))
        bursts = [shuffled[a:b] for a, b in zip([0, *bounds], [*bounds, 12], strict=True)]
        order = TrainingOrder(Scripted(*bursts), TrainSection(iterations=1, order="prompt"), [batch], 0, 2)
        order.begin_mini_batch()
        micro_batches = [micro_batch for window in pack_windows(order, 30, False) for micro_batch in window]
        assert micro_batches == [*pack(own, 30), *pack(others, 30)]


def test_by_index_the_last_own_groups_do_not_wait_for_those_of_others() -> None:
    batch = Batch(0, {i: Prompt(f"p{i}", (3,), {}) for i in range(4)})
    own, other = [random_group(i, 4, (3,)) for i in (0, 2)], cut(random_group(1, 4, (3, 3)), 1)[1]
    source = Scripted(own, [other])
    order = TrainingOrder(source, TrainSection(iterations=1, order="prompt"), [batch], 0, 2)
    order.begin_mini_batch()
    windows = pack_windows(order, 100, whole_backlog=False)
    assert indexes(next(windows)) == [[0, 2]]
    assert source.bursts == [[other]], "nothing more was asked for"
    assert indexes(next(windows)) == [[1]]


def test_in_order_of_completion_the_first_group_does_not_wait_for_company() -> None:
    source = Scripted([random_group(1, 4, (3,))], [], [random_group(0, 4, (3,))])
    windows = pack_windows(order_of(source, "completion", 2), 100, whole_backlog=False)
    assert indexes(next(windows)) == [[1]]
    assert indexes(next(windows)) == [[0]]


def test_a_pipeline_gets_the_whole_backlog_in_one_window() -> None:
    source = Scripted([random_group(i, 4, (3,)) for i in range(4)])
    (window,) = pack_windows(order_of(source, "completion", 4), 12, whole_backlog=True)
    assert indexes(window) == [[0, 1], [2, 3]]


def test_long_group_is_split_between_responses_and_every_part_holds_at_least_one() -> None:
    group = random_group(0, 10, (4, 8, 30, 2, 1, 1))
    parts = split(group, 22, with_prompt=True)
    assert [part.indices for part in parts] == [[0, 1], [2], [3, 4, 5]]
    assert [part.num_rows for part in parts] == [20, 39, 11]
    assert [part.indices for part in split(group, 1, with_prompt=True)] == [[i] for i in range(6)]


def test_slices_of_a_group_that_is_too_long_are_packed_anew(parallel: Parallel) -> None:
    """One that fits by itself needs no pass of its own, and one that does not is run in two stages."""
    group = random_group(0, 10, (8, 2, 3, 4, 40, 2))
    prompts = (None, (7,) * 5, (8,) * 5, (7,) * 5, (9,) * 3, None)
    responses = tuple(replace(r, prompt_ids=own) for r, own in zip(group.responses, prompts, strict=True))
    passes = make_passes([[replace(group, responses=responses)]], parallel, 1.0, 20)
    slices = [[part.indices for batch in a_pass.micro_batches for part in batch.slices] for a_pass in passes]
    assert slices == [[[0, 5]], [[1, 3], [2]], [[4]]]
    assert [type(a_pass) for a_pass in passes] == [PackedPass, PackedPass, TwoStagePass]


def test_second_stage_has_room_for_responses_however_long_the_prompt_is() -> None:
    group = random_group(0, 100, (5,) * 16)
    assert len(split(group, 64, with_prompt=True)) == 16
    parts = split(group, 64, with_prompt=False)
    assert [part.indices for part in parts] == [list(range(16))]
    parts = split(group, 20, with_prompt=False)
    assert [sum(part.fed_lens) for part in parts] == [20, 20, 20, 4]
