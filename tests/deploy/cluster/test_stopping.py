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


def test_with_nohup_a_closed_terminal_ends_nothing_and_other_signals_do() -> None:
    """A shell has SIGINT ignored, too, by what a script starts in the background."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        stop_on_signals()
        signal.raise_signal(signal.SIGHUP)
        for other in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(Stopped):
                signal.raise_signal(other)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
