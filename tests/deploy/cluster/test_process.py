"""A process under its guard."""

from pathlib import Path

import pytest

from deploy.cluster.process import Process, start_process
from deploy.cluster.restarts import BAD_INPUT, may_restart


@pytest.mark.distributed
def test_a_program_that_cannot_be_run_is_named_and_not_tried_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process("x", "instance", ("/no/such/python", "-m", "x"), log, grace_s=1.0)
    running = start_process(process, tmp_path / "failure")
    running.wait_end()
    code = running.exit_code()
    assert code == BAD_INPUT and not may_restart(code, None)
    assert log.read_text() == "cannot run '/no/such/python': No such file or directory\n"
    log.unlink()
    assert "the log cannot be read: No such file or directory" in str(running.failure())
