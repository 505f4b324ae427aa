"""`torchrun -m trainer` on its own: a named error is all that standard error shows."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

import trainer.__main__ as program
from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import Fenced, PublishError, RewardError, RunStopped
from async_rl.method.types import Publication
from async_rl.shared.programs.failure_report import read_failure
from async_rl.shared.programs.start_gate import VARIABLE
from trainer.stop_signal import StopSignal

CONFIG = """
[run]
dir = "run"
[model]
path = "model"
[prompts]
source = "rows.jsonl"
prompts_per_batch = 4
[reward]
name = "math"
[train]
iterations = 3
"""


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_traceback_goes_to_a_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_launched: bool,
) -> None:
    def run(config: Config, stop: StopSignal) -> None:
        raise RewardError("reward x, prompt 3 failed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # Rank 0 looks at the files of the config first.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    if is_launched:
        monkeypatch.setenv("ASYNC_RL_FAILURE_FILE", str(tmp_path / "report"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run.toml").write_text(CONFIG)
    assert program.main(["run.toml"]) == 4, "no restart mends a reward"
    (record,) = [record for record in caplog.records if record.name == "trainer"]
    assert record.getMessage().startswith("RewardError: reward x, prompt 3 failed")
    assert (record.exc_info is not None) == is_launched, "under the launcher standard error is a log"
    traceback = tmp_path / "run" / "logs" / "rank-1.traceback"
    assert traceback.exists() != is_launched
    if not is_launched:
        assert "Traceback" in traceback.read_text() and str(traceback.relative_to(tmp_path)) in record.getMessage()
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["extraInfo"]["py_callstack"] == "RewardError: reward x, prompt 3 failed"


@pytest.mark.parametrize("told", [True, False])
def test_sigterm_before_the_loop_is_reported_as_a_request_to_end_and_no_other_exit_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    def run(config: Config, stop: StopSignal) -> None:
        if told:
            stop.handle(signal.SIGTERM, None)
        sys.exit(7)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ASYNC_RL_FAILURE_FILE", str(tmp_path / "report"))
    (tmp_path / "run.toml").write_text(CONFIG)
    with pytest.raises(SystemExit) as end:
        program.main(["run.toml"])
    assert end.value.code == (143 if told else 7)
    reported = read_failure(tmp_path / "report")
    assert (reported is not None) == told
    if reported is not None:
        assert (reported.kind, reported.may_pass) == ("RunStopped", False)
        assert reported.message == "training rank 1 was told to end (SIGTERM) outside of training"


@pytest.mark.parametrize("code", [0, None])
def test_a_run_that_exits_before_its_end_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    def run(config: Config, stop: StopSignal) -> None:
        sys.exit(code)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "run.toml").write_text(CONFIG)
    with pytest.raises(RuntimeError, match=r"sys\.exit\(\) was called while training"):
        program.main(["run.toml"])


def test_a_rank_that_waits_for_its_launcher_has_loaded_and_opened_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    @contextmanager
    def ranks(config: Config, stop: StopSignal) -> Iterator[tuple[None, None]]:
        yield None, None

    def open_session(*_: object, **__: object) -> NoReturn:
        raise Reached

    def open_gate() -> None:
        was_loaded.append("trainer.session" in sys.modules)
        gate.touch()

    gate = tmp_path / "start"
    was_loaded: list[bool] = []
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setattr(program, "training_ranks", ranks)
    monkeypatch.setattr("trainer.session.open_session", open_session)
    monkeypatch.setenv(VARIABLE, str(gate))
    monkeypatch.setattr("async_rl.shared.programs.start_gate.time.sleep", lambda _: open_gate())
    with pytest.raises(Reached):
        program.run(load_config(tmp_path / "run.toml"), StopSignal())
    assert was_loaded == [True], "waited, for one look at the gate, after its imports"


def test_sigterm_amid_an_import_ends_a_rank_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr("trainer.stop_signal.os._exit", end)
    reported: list[bool] = []
    stop = StopSignal(lambda: reported.append(True))
    with pytest.raises(Ended, match="143"), stop.loading():
        stop.handle(signal.SIGTERM, None)
    assert reported == [True], "the launcher is told all the same"
    with pytest.raises(SystemExit):
        StopSignal().handle(signal.SIGTERM, None)


@pytest.mark.distributed
def test_closed_output_is_no_fault() -> None:
    command = f"{shlex.quote(sys.executable)} -m trainer --help >&-"
    assert subprocess.run(["sh", "-c", command], capture_output=True).returncode == 0


def test_the_trained_weights_are_evaluated_and_what_fails_costs_no_run(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []

    def of(error: Exception | None) -> SimpleNamespace:
        def publish() -> Publication:
            if error is not None:
                raise error
            return Publication("v3", "", (), 0, 0.0)

        return SimpleNamespace(
            rank=SimpleNamespace(publish_weights=publish), evaluate_trained=lambda version: said.append(version)
        )

    config = cast(Any, SimpleNamespace(run=SimpleNamespace(dir=Path("run"))))
    shutdown = cast(Any, SimpleNamespace(synchronize=lambda *, may_stop: said.append("met")))
    program._evaluate_trained(config, cast(Any, of(None)), shutdown)
    assert said == ["v3", "met"] and not caplog.text
    program._evaluate_trained(config, cast(Any, of(PublishError("no instance took them"))), shutdown)
    assert said == ["v3", "met", "met"], "the other ranks are not left waiting"
    assert "the trained weights are not evaluated: PublishError: no instance took them; async-rl eval" in caplog.text
    for error in (RunStopped("told to end"), Fenced("another trainer")):
        with pytest.raises(type(error)):
            program._evaluate_trained(config, cast(Any, of(error)), shutdown)
