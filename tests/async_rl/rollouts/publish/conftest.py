"""Publishers that try again at once."""

from collections.abc import Iterator

import pytest

from async_rl.rollouts.publish import publisher as publisher_module
from async_rl.shared.event_loop import EventLoopThread
from tests.support.publishing import Publishing


@pytest.fixture
def publishing(loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publishing]:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.05)
    publishing = Publishing(loop)
    yield publishing
    publishing.close()
