"""The producer as a process: what it is given, what it needs, and how it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError, Fenced, ProducerLost, RunStopped
from async_rl.producer import process as process_module
from async_rl.producer.process import ProducerProcess, kill_marked
from async_rl.shared.locks.lease import take_lease
from async_rl.shared.programs.process_guard import PRODUCER_MARK
from tests.support import ROOT
from tests.support.minimal_config import config_of

CONFIGS = sorted(path for path in ROOT.glob("examples/*/run.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_a_config_that_is_handed_on_is_the_same(path: Path) -> None:
    config = load_config(path, {})
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.distributed
def test_it_loads_a_tokenizer_and_writes_figures_without_torch(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import async_rl.producer.program\n"
        "from async_rl.rollouts.tokenizer import load_tokenizer\n"
        "from async_rl.records.trackers.tensorboard_tracker import ScalarFile\n"
        "from pathlib import Path\n"
        f"tokenizer, _ = load_tokenizer('tiny', {str(tiny_model())!r})\n"
        "assert tokenizer.decode(tokenizer.encode('w1', add_special_tokens=False))\n"
        f"ScalarFile(Path({str(tmp_path)!r}), 0).close()\n"
        "assert 'torch' not in sys.modules, 'it was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "PyTorch was not found" not in done.stderr


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run").mkdir()
    return config_of(run={"dir": str(tmp_path / "run")}, pool={"instances": ["http://127.0.0.1:9"]})


@pytest.mark.distributed
def test_what_users_code_has_started_is_killed_with_the_producer_that_started_it() -> None:
    """In a session of its own, and an orphan by then; what another one started stays."""
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '987'], start_new_session=True, stdout=2).pid, flush=True)"
    )
    started = [
        int(subprocess.check_output([sys.executable, "-c", code], env={**os.environ, PRODUCER_MARK: mark}))
        for mark in ("one", "another")
    ]
    kill_marked("one")
    try:
        psutil.wait_procs([process for pid in started[:1] if (process := found(pid))], 10)
        assert [found(pid) is not None for pid in started] == [False, True]
    finally:
        kill_marked("another")


def found(pid: int) -> psutil.Process | None:
    """A living process."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


@pytest.mark.distributed
def test_it_ends_with_its_connection_or_is_lost(config: Config) -> None:
    lease = take_lease(config.run.dir, 30.0)
    process = ProducerProcess(config, lease.name, "127.0.0.1")
    control = process.address().connect(30.0)
    control.close()
    process.end(60.0)
    assert process._process.returncode == 0
    killed = ProducerProcess(config, lease.name, "127.0.0.1")
    connection = killed.address().connect(30.0)
    killed._process.kill()
    with pytest.raises(ProducerLost):
        while True:
            connection.receive(10.0)
    killed.end(10.0)
    lease.release()


@pytest.mark.distributed
def test_one_that_hangs_while_it_starts_can_be_given_up_and_is_killed(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take_lease(config.run.dir, 30.0)
    process = ProducerProcess(config, lease.name, "127.0.0.1")
    process._process.send_signal(signal.SIGSTOP)

    def give_up() -> None:
        raise RunStopped("told to end")

    with pytest.raises(RunStopped):
        process.address(give_up)
    monkeypatch.setattr(process_module, "START_TIMEOUT_S", 0.0)
    with pytest.raises(ProducerLost, match="did not start within 0 s"):
        process.address()
    process.end(0.0)
    assert process._process.returncode == -signal.SIGKILL
    lease.release()


@pytest.mark.distributed
def test_what_keeps_it_from_starting_is_named(config: Config) -> None:
    lease = take_lease(config.run.dir, 30.0)
    with pytest.raises(ConfigError, match="the producer cannot listen"):
        ProducerProcess(config, lease.name, "192.0.2.1").address()
    with pytest.raises(Fenced, match="under another lease"):
        ProducerProcess(config, "another:1", "127.0.0.1").address()
    empty = config.model_copy(update={"pool": config.pool.model_copy(update={"instances": ()})})
    with pytest.raises(ConfigError, match=r"pool\.instances is empty"):
        ProducerProcess(empty, lease.name, "127.0.0.1").address()
    lease.release()
