from types import SimpleNamespace

import pytest

from deploy.quickstart.reward import spelled_backward


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("nus", "stop", 1.0),
        ("nut", "stop", 1 / 3),
        ("xyz", "stop", 0.0),
        ("", "stop", 0.0),
        ("nus", "length", 0.0),
        # One letter too many scores 0.8 with the task and is not exact.
        ("nuss", "stop", 0.4),
    ],
)
def test_reward(text: str, finish_reason: str, expected: float) -> None:
    response = SimpleNamespace(text=text, finish_reason=finish_reason)
    assert spelled_backward(None, [response, response], {"answer": "nus"}) == pytest.approx([expected] * 2)
