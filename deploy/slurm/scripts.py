"""From a plan to the job scripts of a run: pure text. `deploy.slurm.__main__` writes and submits them.

- `training.sbatch`: one job with all training nodes. Its batch process (`deploy.slurm.task`) starts torchrun on every
  node through srun.
- `node.sh`: what srun starts on each of them.
- `instances.sbatch`: an array with one task for each instance, which are independent of each other: losing the node of
  one of them neither ends nor requeues another one, nor the trainer.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from async_rl.errors import ConfigError
from deploy.cluster.plan import ClusterPlan, Resources
from deploy.cluster.process import log_path, stopped_after_s
from deploy.slurm.files import NODE, folder_of, token_file

TRAINER = "trainer"
INSTANCE = "instance-$SLURM_ARRAY_TASK_ID"
FIRST_NODE = "$SLURM_LAUNCH_NODE_IPADDR"
"""The address from which srun was started: by the batch process, so that of the job's first node."""

TRAINING_JOB = "$1"
"""The argument with which `instances.sbatch` is submitted."""

GRES = {"cuda": "gpu", "npu": "npu"}
"""Slurm's names of the devices, by `trainer.device`."""

ENDING_MARGIN_S = 60.0
"""From the last moment at which a task may still be saving to the time limit of its job."""


def training_script(plan: ClusterPlan) -> str:
    """The job that trains."""
    options = [
        _option(f"--job-name={plan.name}-training"),
        f"--nodes={plan.num_nodes}",
        *_common(plan, plan.node, plan.training_grace_s, TRAINER),
        *plan.config.cluster.slurm_options.get("training", ()),
    ]
    srun = [
        *("srun", f"--nodes={plan.num_nodes}", "--ntasks-per-node=1", f"--cpus-per-task={plan.node.cores}"),
        *("--kill-on-bad-exit=1", "bash", str(folder_of(_run_dir(plan)) / NODE)),
    ]
    return _script(
        f"Trains {plan.name}: torchrun on {plan.num_nodes} node(s).",
        options,
        [
            *_exports(plan),
            *_kept(plan, TRAINER, "trainer", plan.training_grace_s, srun),
        ],
    )


def node_script(plan: ClusterPlan) -> str:
    """What srun starts on each training node; SIGURG asks torchrun to save and end, see `commands.end_steps`."""
    argv = plan.training_argv(node_rank="$SLURM_NODEID", master_address=FIRST_NODE)
    return _script(
        "torchrun on one training node.",
        [],
        [
            *_visible_devices(plan.node),
            f"{_command(argv)} &",
            "torchrun=$!",
            "# Slurm signals all processes of a step. SIGTERM would also end those of rewards, before the trainer",
            "# has saved; SIGURG ends none, and this script passes it on as SIGTERM to torchrun alone.",
            "trap 'kill -TERM \"$torchrun\"' URG",
            "trap : TERM",
            'while kill -0 "$torchrun" 2> /dev/null; do wait "$torchrun"; code=$?; done',
            'exit "$code"',
        ],
    )


def instances_script(plan: ClusterPlan) -> str:
    """The array of instances."""
    options = [
        _option(f"--job-name={plan.name}-instances"),
        f"--array=0-{plan.max_instances - 1}",
        "--nodes=1",
        *_common(plan, plan.instance, plan.instance_grace_s, "instance-%a"),
        *plan.config.cluster.slurm_options.get("instances", ()),
    ]
    argv = plan.instance_argv(name=INSTANCE, port=0, register=str(_run_dir(plan)))
    return _script(
        f"Instances of {plan.name}: each registers itself with the trainer, through the run's directory.",
        options,
        [
            *_exports(plan),
            *_visible_devices(plan.instance),
            *_kept(plan, INSTANCE, "instance", plan.instance_grace_s, argv, {"--training-job": TRAINING_JOB}),
        ],
    )


def _common(plan: ClusterPlan, demand: Resources, grace_s: float, log: str) -> list[str]:
    """sbatch options of both jobs; of an option that is repeated the last one counts."""
    file = str(log_path(_run_dir(plan), log.replace("%a", "\0"))).replace("%", "%%").replace("\0", "%a")
    devices = [f"--gres={GRES[demand.kind]}:{demand.devices}"] if demand.devices else []
    # Slurm itself assigns GPUs. It only counts NPUs, so their numbers are known on whole nodes alone.
    whole = ["--exclusive"] if demand.kind == "npu" else []
    return [
        *("--ntasks-per-node=1", f"--cpus-per-task={demand.cores}", *devices, *whole),
        *(_option(f"--chdir={Path.cwd()}"), _option(f"--output={file}"), "--open-mode=append"),
        # Before the time limit the batch process alone is told, saves and is submitted again: deploy/slurm/task.py.
        *("--requeue", f"--signal=B:USR1@{math.ceil(grace_s + ENDING_MARGIN_S)}"),
        *plan.config.cluster.slurm_options.get("all", ()),
    ]


def _option(word: str) -> str:
    """An option with a path, in quotes as sbatch reads them: it takes backslashes for escapes there, too.

    Raises:
        ConfigError: there is no way to write it.
    """
    if set(word) & set("\\\n\r"):
        name, _, value = word.partition("=")
        raise ConfigError(
            f"{value!r} cannot be written as sbatch's {name}: name a run.dir without backslashes and line breaks, and "
            "start the launcher in such a directory"
        )
    return shlex.quote(word)


def _exports(plan: ClusterPlan) -> list[str]:
    """The environment of a task; the token comes from a file that only the user can read."""
    return [
        f'export ASYNC_RL_TOKEN="$(cat {shlex.quote(str(token_file(_run_dir(plan))))})"',
        *(f"export {name}={shlex.quote(value)}" for name, value in plan.env.items()),
    ]


def _visible_devices(demand: Resources) -> list[str]:
    if demand.kind != "npu":
        return []
    return [f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, range(demand.devices)))}"]


def _kept(
    plan: ClusterPlan, name: str, role: str, grace_s: float, argv: Sequence[str], more: Mapping[str, str] | None = None
) -> list[str]:
    """The last line: the batch process becomes the program that keeps the task going."""
    cluster = plan.config.cluster
    options: Mapping[str, object] = {
        "--name": name,
        "--role": role,
        "--run-dir": _run_dir(plan),
        "--grace-s": grace_s,
        "--stopped-after-s": stopped_after_s(plan.config.trainer.lost_after_s),
        "--max-restarts": cluster.max_restarts,
        **(more or {}),
    }
    words = [*_python(plan), *(word for key, value in options.items() for word in (key, str(value)))]
    return [f"exec {_command(words)} \\\n    -- {_command(argv)}"]


def _python(plan: ClusterPlan) -> list[str]:
    return [plan.training_argv(node_rank="0", master_address="")[0], "-m", "deploy.slurm.task"]


def _run_dir(plan: ClusterPlan) -> Path:
    return plan.config.run.dir.resolve()


def _command(words: Iterable[str]) -> str:
    """A command for the shell, which expands the variables of the scripts and nothing else."""
    variables = (INSTANCE, TRAINING_JOB, FIRST_NODE, "$SLURM_NODEID")
    return " ".join(f'"{word}"' if word in variables else shlex.quote(word) for word in words)


def _script(title: str, options: Iterable[str], body: Iterable[str]) -> str:
    lines = ["#!/bin/bash", f"# {title} Written by `async-rl launch slurm`.", *(f"#SBATCH {word}" for word in options)]
    return "\n".join([*lines, "", *body]) + "\n"
