"""Layouts on emulated NPUs train what one rank trains on the CPU, within the bounds of the CPU's own matrix."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.method.types import Group
from tests.support.devices.emulated import layout_worker
from tests.support.devices.emulated.build import lacking
from tests.support.devices.emulated.environment import emulated_environment, recorded_races
from tests.support.tiers import at_night
from tests.support.trainer.layout_comparison import OneRank, Ranks, compare
from tests.support.trainer.layout_matrix import cases, cover_of, drawn, in_bfloat16, with_frozen_models
from trainer.parallel import Parallel

CUDA_WORKER = "tests.support.devices.emulated.cuda_worker"
"""A program only: it needs an emulated NPU to be imported."""

WHOLE = pytest.param(None, marks=[pytest.mark.layouts, pytest.mark.timeout(7200)])

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def one_rank(tiny_model: Callable[..., Path], parallel: Parallel, ragged_groups: list[Group]) -> OneRank:
    return OneRank(tiny_model, parallel, ragged_groups)


@pytest.fixture
def on_npus(tmp_path: Path) -> Iterator[Ranks]:
    """Programs that may not use memory that another stream writes, without waiting for it."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    yield Ranks(layout_worker.__name__, emulated_environment(tmp_path))
    assert not recorded_races(tmp_path)


@pytest.mark.devices
def test_every_kind_and_setting_of_two_ranks_trains_what_a_cpu_trains(
    one_rank: OneRank, on_npus: Ranks, tmp_path: Path
) -> None:
    compare(cover_of(with_frozen_models(cases(2)), strength=1), one_rank, tmp_path, 600, on_npus)


@pytest.mark.nightly
def test_the_module_for_cuda_trains_what_a_cpu_trains(one_rank: OneRank, tmp_path: Path) -> None:
    """In bfloat16, which its kernel takes."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    ranks = Ranks(CUDA_WORKER, emulated_environment(tmp_path))
    compare(cover_of(in_bfloat16(cases(2)), strength=1), one_rank, tmp_path, 1700, ranks)
    assert not recorded_races(tmp_path)


@pytest.mark.parametrize("number", [at_night(6), WHOLE])
def test_kinds_and_settings_of_four_ranks_train_what_a_cpu_trains(
    number: int | None, one_rank: OneRank, on_npus: Ranks, tmp_path: Path
) -> None:
    """Each takes a minute of both cores, the whole cover the best part of an hour."""
    cover = cover_of(with_frozen_models(cases(4)), strength=1)
    compare(drawn(cover, number or len(cover)), one_rank, tmp_path, 1700 if number else 7000, on_npus)


@pytest.mark.nightly
def test_layouts_of_two_ranks_train_what_a_cpu_trains_under_the_real_mindspeed(
    one_rank: OneRank, mindspeed: str, tmp_path: Path
) -> None:
    ranks = Ranks(layout_worker.__name__, emulated_environment(tmp_path, mindspeed))
    compare(cover_of(with_frozen_models(cases(2)), strength=1), one_rank, tmp_path, 600, ranks)


@pytest.mark.nightly
def test_bfloat16_on_two_ranks_stays_within_the_derived_bound(
    one_rank: OneRank, on_npus: Ranks, tmp_path: Path
) -> None:
    compare(cover_of(in_bfloat16(cases(2))), one_rank, tmp_path, 1700, on_npus)
