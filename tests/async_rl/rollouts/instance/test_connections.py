"""How many files a process asks for, on every kind of system."""

import pytest

from async_rl.rollouts.instance.connections import OTHER_FILES, FilePlan, plan_files

INFINITE_ON_LINUX, INFINITE_ON_MACOS = -1, 2**63 - 1


@pytest.mark.parametrize("infinity", [INFINITE_ON_LINUX, INFINITE_ON_MACOS])
def test_an_infinite_hard_limit_is_not_asked_for_but_what_every_system_gives(infinity: int) -> None:
    plan = plan_files(256, infinity, infinity)
    assert plan.soft == 10_240 and plan.num_generating + plan.num_control == 10_240 - OTHER_FILES


def test_the_soft_limit_is_raised_to_a_finite_hard_one_and_never_lowered() -> None:
    assert plan_files(1024, 4096, INFINITE_ON_LINUX).soft == 4096
    assert plan_files(4096, 4096, INFINITE_ON_LINUX).soft is None
    assert plan_files(20_000, INFINITE_ON_MACOS, INFINITE_ON_MACOS).soft is None


def test_no_limit_at_all_stays_none() -> None:
    assert plan_files(INFINITE_ON_LINUX, INFINITE_ON_LINUX, INFINITE_ON_LINUX) == FilePlan(None, 0, 0)


@pytest.mark.parametrize("limit", [1, OTHER_FILES, OTHER_FILES + 1, 1024, 2**20])
def test_both_kinds_of_calls_have_a_connection_however_few_there_are(limit: int) -> None:
    plan = plan_files(limit, limit, INFINITE_ON_LINUX)
    assert plan.num_generating >= 1 and plan.num_control >= 1
