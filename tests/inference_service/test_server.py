"""How many threads an instance computes with."""

import os

import pytest

from inference_service.server import _num_threads


@pytest.mark.parametrize(("told", "expected"), [("3", 3), ("4,2", 4), (" 2 ,1", 2)])
def test_threads_are_those_of_openmps_outermost_level(told: str, expected: int) -> None:
    assert _num_threads({"OMP_NUM_THREADS": told}) == expected


@pytest.mark.parametrize("told", [None, "", "0", "-1", "many", ",2"])
def test_without_a_number_there_is_a_thread_for_each_core(told: str | None) -> None:
    environment = {} if told is None else {"OMP_NUM_THREADS": told}
    assert _num_threads(environment) == os.cpu_count()
