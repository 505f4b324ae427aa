"""Optional parts: the core loads none of them unasked, says which one is missing, and works without each."""

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from async_rl import cli
from async_rl.checks.preflight.reward import require_reward
from async_rl.checks.preflight.user_file import require_program
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.function import load_function
from async_rl.shared.programs.parts import PARTS, folder_of, load_part
from deploy import launch, status
from deploy.cluster.tasks import Task, write_launch
from tests.support import ROOT

ENTRIES = (
    *("async_rl.cli", "async_rl.trainer", "async_rl.producer.__main__", "async_rl.producer.service"),
    *(
        "async_rl.evaluation.__main__",
        "async_rl.checks.preflight.trial",
        "async_rl.rollouts.rewards.worker",
        "async_rl.rollouts.fleet.server",
    ),
    *(
        "async_rl.rollouts.agents.program_worker",
        "async_rl.rollouts.fleet.cli",
        "inference_service.__main__",
        "inference_service.server",
    ),
    *("trainer.__main__", "trainer.session", "trainer.export", "deploy.local.run", "deploy.local.check"),
    *("deploy.local.evaluate", "deploy.launch", "deploy.status", "deploy.watch", "deploy.doctor.__main__"),
    *("deploy.init.__main__", "deploy.verify.__main__", "deploy.quickstart.__main__", "inference_service.server"),
)
SHOW_LOADED = f"""
import sys
from importlib import import_module
for name in {ENTRIES}:
    import_module(name)
print([name for name in sys.modules if ".".join(name.split(".")[:2]) in {tuple(PARTS.values())}])
"""


@pytest.mark.nightly  # an import contract holds it, but for what is loaded by name
@pytest.mark.distributed
def test_no_entry_point_of_the_core_loads_an_optional_part() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW_LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def without_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the removal of their folders, of which Python may leave its compiled files."""
    for part in PARTS:
        (tmp_path / folder_of(part) / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr("async_rl.shared.programs.parts.ROOT", tmp_path)


@pytest.mark.usefixtures("without_parts")
@pytest.mark.parametrize(
    ("part", "choose"),
    [
        ("gateway", lambda: require_program(RolloutSection(program="command:true"))),
        ("sandbox", lambda: require_reward(RewardSection(name="code"))),
        ("sandbox", lambda: load_function(RewardSection(name="code"))),
        *((part, lambda part=part: load_part(part, "any")) for part in PARTS),
    ],
)
def test_choosing_a_part_that_is_missing_is_an_error_that_names_it(part: str, choose: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=f"optional part '{part}' is missing here: restore its folder .*/{part}/"):
        choose()


@pytest.mark.usefixtures("without_parts")
def test_commands_of_a_part_that_is_missing_name_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("dashboard", "report", "samples"):
        monkeypatch.setattr(sys, "argv", ["async-rl", command, "run"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert f"async-rl {command}: the optional part 'dashboard' is missing" in capsys.readouterr().err
    for engine in launch.ENGINES:
        assert launch.main([engine, "run.toml"]) == 2
        assert f"async-rl launch: the optional part '{engine}' is missing" in capsys.readouterr().err


@pytest.mark.usefixtures("without_parts")
def test_a_run_of_slurm_has_a_status_without_that_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Task("trainer", "trainer", state="submitted")
    write_launch(tmp_path, "slurm", [task])
    assert status.read_status(tmp_path, None).tasks == (task,)
    assert "Slurm does not tell the states of its jobs: the optional part 'slurm'" in capsys.readouterr().err


@pytest.mark.usefixtures("without_parts")
def test_a_fleet_endpoint_without_the_dashboard_has_the_rest(make_pool, serve, tmp_path: Path) -> None:
    endpoint = serve(make_pool("http://10.0.0.1:8000"), token="secret", run_dir=tmp_path)
    assert endpoint.ask("/fleet")[0] == 200 and endpoint.ask("/dashboard/api/runs")[0] == 404


ONLY_THE_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
"""
"""A `sitecustomize.py`: an editable installation would find the part in the checkout that is installed."""


def copy_without(parts: Collection[str], to: Path) -> None:
    """The files that git tracks, but for those of the parts and of their tests."""
    removed = [Path(folder_of(part)) for part in parts]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in map(Path, listed.rstrip("\0").split("\0")):
        is_removed = any(name.is_relative_to(each) or name.is_relative_to("tests" / each) for each in removed)
        if not is_removed and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


@pytest.mark.nightly
@pytest.mark.distributed
# The fast tests take three minutes where nothing else runs.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [1, len(PARTS)])
def test_the_fast_tests_pass_without_one_of_the_parts_and_without_all(
    number: int, rng: random.Random, tmp_path: Path
) -> None:
    copy_without(rng.sample(list(PARTS), number), tmp_path)
    (tmp_path / "sitecustomize.py").write_text(ONLY_THE_COPY)
    fast, workers = (
        re.findall(rf"^{name} := (.*)$", (ROOT / "Makefile").read_text(), re.M)[0] for name in ("FAST", "WORKERS")
    )
    # They compare the documents with the whole tree.
    left_out = ("--ignore=tests/test_docs.py", "--ignore=tests/test_guarantees.py")
    command = [sys.executable, "-m", "pytest", "-m", fast, *workers.split(), *left_out, "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
