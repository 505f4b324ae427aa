"""Limits that no program could keep are refused."""

import pytest

from async_rl.parts.sandbox import Limits


@pytest.mark.parametrize("limit", ["wall_s", "file_bytes", "num_files"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_of_nothing_is_refused(limit: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"the limit {limit} is .*: expected a number above 0"):
        Limits(**{limit: value})
