"""The wheel in environments of its own, away from the checkout: what each extra brings, and what a missing one says."""

import json
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from async_rl import __version__
from tests.support import ROOT
from tests.support.environments import PACKAGES, Environment
from tests.support.minimal_config import MINIMAL

pytestmark = pytest.mark.packaging

HEAVY = {"torch", "megatron-core", "transformers", "vllm", "fastapi", "tensorboard", "reasoning-gym"}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
import async_rl
missing = {}
for module in pkgutil.walk_packages(async_rl.__path__, "async_rl."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing.setdefault(error.name.partition(".")[0], []).append(module.name)
assert not {"torch", "megatron", "vllm"} & set(sys.modules)
print(json.dumps({"file": async_rl.__file__, "missing": missing}))
"""


def test_wheel_and_source_archive_hold_all_that_the_packages_have(built: Path) -> None:
    in_wheel = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    archive = next(built.glob("*.tar.gz"))
    with tarfile.open(archive) as source:
        in_source = {name.partition("/")[2] for name in source.getnames()}
    code = {name for name in in_wheel if ".dist-info/" not in name}
    chart = (ROOT / "deploy" / "kubernetes" / "chart").rglob("*")
    files = {path.relative_to(ROOT).as_posix() for path in chart if path.is_file()}
    static = (ROOT / "async_rl" / "parts" / "dashboard" / "static").rglob("*")
    files |= {path.relative_to(ROOT).as_posix() for path in static if path.is_file()}
    files |= {f"deploy/quickstart/{name}" for name in ("config.toml", "smollm2/config.toml")}
    assert {f"{package}/py.typed" for package in PACKAGES} | files <= code
    assert code <= in_source
    assert archive.name == f"async_rl-{__version__}.tar.gz"


def test_base_imports_all_that_needs_no_extra(base: Environment) -> None:
    assert not HEAVY & base.names()
    done = base.run("python", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stdout
    said = json.loads(done.stdout)
    assert Path(said["file"]).is_relative_to(base.path)
    # The trainer's part of it: weights, what publishes them, the fleet's own server, two ready rewards, a sandbox.
    from_extras = {"torch", "transformers", "fastapi", "uvicorn", "prometheus_client", "math_verify", "reasoning_gym"}
    assert set(said["missing"]) == from_extras | {"lm_eval", "renderers", "sandlock", "wandb", "mlflow", "trackio"}
    assert said["missing"]["renderers"] == ["async_rl.rollouts.agents.known_rendering"]
    missing = {name for names in said["missing"].values() for name in names}
    assert not [
        name
        for name in missing
        if name.startswith(("async_rl.rollouts.pool", "async_rl.rollouts.instance", "async_rl.config"))
    ]
    assert {name for name in missing if name.startswith("async_rl.rollouts.rewards")} == {
        "async_rl.rollouts.rewards.math",
        "async_rl.rollouts.rewards.reasoning_gym",
    }


@pytest.mark.parametrize("command", ["quickstart", "run", "launch", "status", "export", "serve", "fleet", "eval"])
def test_base_shows_the_help_of_every_command(base: Environment, command: str) -> None:
    done = base.run("async-rl", command, "--help")
    assert done.returncode == 0 and "usage:" in done.stdout, done.stdout
    assert base.run("async-rl", "--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        (("async-rl", "quickstart"), "trainer,serve,tasks"),
        (("async-rl", "run", "run.toml"), "trainer,serve"),
        (("async-rl", "run", "run.toml", "--inference.engine", "vllm", "--inference.python", "python3"), "trainer"),
        (("async-rl", "export", "run", "--to", "exported"), "trainer"),
        (("async-rl", "serve", "--model", "org/model"), "serve"),
        (("async-rl", "eval", "org/model", "--data", "rows.jsonl", "--reward", "math"), "trainer,serve"),
        (("python", "-m", "async_rl.trainer", "run.toml"), "trainer"),
        (("python", "-m", "async_rl.evaluation", "run.toml", "--out", "out"), "trainer"),
        (("python", "-m", "deploy.ray", "run.toml"), "ray"),
    ],
    ids=" ".join,
)
def test_a_command_without_its_extra_names_the_extra(base: Environment, command: tuple[str, ...], extras: str) -> None:
    (base.home / "run.toml").write_text(MINIMAL)
    done = base.run(*command)
    assert done.returncode == 2, done.stdout
    assert f"'async-rl[{extras}]'" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    "command", ["run run.toml --dry-run", "fleet ls", "export run --to exported", "serve --model m"]
)
def test_files_of_the_working_directory_replace_no_module(base: Environment, command: str) -> None:
    home = base.home / "shadows"
    home.mkdir(exist_ok=True)

    def said() -> str:
        return re.sub(r"\d", "0", base.run("async-rl", *command.split(), cwd=home).stdout)

    before = said()
    for name in ("random.py", "types.py", "trainer/__init__.py", "deploy/__init__.py", "async_rl/__init__.py"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("raise AssertionError('imported')\n")
    assert said() == before
    shutil.rmtree(home)


def test_serve_brings_the_embedded_engine_and_no_trainer(with_serve: Environment) -> None:
    assert not {"megatron-core", "vllm", "tensorboard"} & with_serve.names()
    done = with_serve.run("python", "-c", "import inference_service.server, inference_service.registration")
    assert done.returncode == 0, done.stdout
    done = with_serve.run("async-rl", "serve", "--help")
    assert done.returncode == 0, done.stdout
    (with_serve.home / "run.toml").write_text(MINIMAL)
    assert "'async-rl[trainer]'" in with_serve.run("async-rl", "run", "run.toml").stdout


def test_trainer_brings_the_trainer(with_trainer: Environment) -> None:
    done = with_trainer.run(
        "python", "-c", "import trainer.session, trainer.shutdown, trainer.checkpoint.policy_export"
    )
    assert done.returncode == 0, done.stdout
    done = with_trainer.run("python", "-m", "async_rl.trainer", "--help")
    assert done.returncode == 0, done.stdout


def test_vllm_adds_only_what_vllm_does_not_bring(base: Environment, with_vllm: Environment) -> None:
    assert with_vllm.names() - base.names() == {"xxhash"}


# A minute and a half on two quiet cores, nearly all of it the warm start, which always goes its way.
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quickstart_runs_from_the_wheel(with_all: Environment) -> None:
    done = with_all.run("async-rl", "quickstart", "--iterations", "2", "--run-dir", "quick", timeout_s=840)
    assert done.returncode == 0, done.stdout
    summary = json.loads((with_all.home / "quick" / "summary.json").read_text())
    assert summary["iterations"] == 2 and summary["on_policy"]
    assert (with_all.home / "quick" / "report.html").is_file()
