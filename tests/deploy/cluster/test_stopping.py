import signal
from collections.abc import Iterator

import pytest

from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_signal_does_not_claim_that_everything_has_ended(
    handlers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one waits until all processes have; the second one ends that wait."""
    said = []
    for _ in range(2):
        with pytest.raises(Stopped) as stop:
            signal.raise_signal(signal.SIGINT)
        assert explain_end(stop.value) == 128 + signal.SIGINT
        said.append(capsys.readouterr().err)
    assert "stopped by SIGINT; all its processes have ended" in said[0]
    assert "stopped by SIGINT; its processes save what they can, and end by themselves" in said[1]
