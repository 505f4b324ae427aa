"""What each kind of failed request says about its instance."""

import pytest

from async_rl.errors import (
    BrokenAnswer,
    ConnectionLost,
    InstanceError,
    InstanceRefused,
    InstanceRestarted,
    InstanceStalled,
    InstanceTooSlow,
    InstanceUnreachable,
    NeedsWeights,
    StaleWeights,
)
from async_rl.rollouts.pool.roster import Blame, blame_of

CASES: list[tuple[InstanceError, Blame]] = [
    (InstanceTooSlow("slow"), "none"),
    (InstanceStalled("no tokens"), "lost"),
    (InstanceUnreachable("timeout"), "pause"),
    (ConnectionLost("reset"), "pause"),
    (InstanceError("an answer without an end"), "pause"),
    (StaleWeights("v0"), "barred"),
    (InstanceRestarted("anew", "boot-2"), "barred"),
    (BrokenAnswer("flood"), "barred"),
    (NeedsWeights("half an update", 503), "pause"),
    *((InstanceRefused("refused", status), "pause") for status in (408, 425, 429, 500, 501, 502, 503, 504, 599)),
    *((InstanceRefused("refused", status), "barred") for status in (301, 307, 400, 401, 403, 404, 405, 422)),
]


@pytest.mark.parametrize(("error", "blame"), CASES, ids=lambda each: f"{each!r}")
def test_every_kind_of_failure_has_its_consequence(error: InstanceError, blame: Blame) -> None:
    assert blame_of(error) == blame
