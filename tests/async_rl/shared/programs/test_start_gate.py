"""A program waits for the one that started it where that asks for it, and only there."""

import threading
import time
from pathlib import Path

from async_rl.shared.programs.start_gate import VARIABLE, wait_at_gate


def test_a_program_without_a_gate_does_not_wait() -> None:
    wait_at_gate({})


def test_a_program_waits_until_its_gate_is_opened_and_not_again(tmp_path: Path) -> None:
    gate = tmp_path / "start"
    opened_s: list[float] = []

    def open_it() -> None:
        opened_s.append(time.monotonic())
        gate.touch()

    opening = threading.Timer(0.3, open_it)
    opening.start()
    wait_at_gate({VARIABLE: str(gate)})
    assert opened_s and time.monotonic() >= opened_s[0]
    opening.join()
    wait_at_gate({VARIABLE: str(gate)})
