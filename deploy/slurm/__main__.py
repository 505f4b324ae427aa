"""`async-rl launch slurm CONFIG [--dry-run] ...`: writes the job scripts of a run, and submits them.

The scripts are in `run.dir/slurm/`. The training job is submitted first; the instances wait until it has started, so
that none holds devices while the trainer is in the queue.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_rl.checks.preflight import require_sound
from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, RunDirInUse
from async_rl.shared.files import named_write_errors, write_file
from async_rl.shared.programs.command_line import Parser
from deploy.cluster.fleet import require_no_trainer
from deploy.cluster.plan import ClusterPlan, plan_cluster
from deploy.cluster.process import log_path
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.cluster.tasks import LAUNCH_FILE, Task, read_launch, remove_tasks, write_launch
from deploy.slurm.commands import cancel, own_jobs, require_slurm, submit
from deploy.slurm.files import INSTANCES, NODE, TRAINING, folder_of, read_token, write_token
from deploy.slurm.scripts import instances_script, node_script, training_script


def scripts(plan: ClusterPlan) -> Mapping[str, str]:
    """The job scripts of a run, by file name."""
    return {TRAINING: training_script(plan), NODE: node_script(plan), INSTANCES: instances_script(plan)}


def describe(plan: ClusterPlan) -> str:
    """The job scripts and the commands that submit them, as they would be written and run."""
    folder = folder_of(plan.config.run.dir.resolve())
    parts = [f"# {folder / name}\n{text}" for name, text in scripts(plan).items()]
    commands = ["sbatch --parsable " + shlex.join(training_words(plan))]
    commands.append("sbatch --parsable " + shlex.join(instances_words(plan, "TRAINING_JOB")))
    return "\n".join([*parts, "# submitted by", *commands])


def training_words(plan: ClusterPlan) -> list[str]:
    return [str(folder_of(plan.config.run.dir.resolve()) / TRAINING)]


def instances_words(plan: ClusterPlan, training_job: str) -> list[str]:
    """`after`: once the training job has started, whatever becomes of it."""
    script = str(folder_of(plan.config.run.dir.resolve()) / INSTANCES)
    return [f"--dependency=after:{training_job}", script, training_job]


def launch(plan: ClusterPlan, token: str | None) -> tuple[str, str]:
    """Writes the scripts and submits them; returns the ids of the training job and of the array of instances.

    Raises:
        RunDirInUse: the run goes on already, or jobs of it are in the queue.
        SlurmFailed: Slurm refuses a job; none is left in the queue.
        WriteFailed: a file cannot be written.
    """
    run_dir = plan.config.run.dir.resolve()
    _require_no_jobs(run_dir)
    require_no_trainer(run_dir, token or read_token(run_dir))
    folder = folder_of(run_dir)
    with named_write_errors(folder):
        run_dir.mkdir(parents=True, exist_ok=True)
        # Whatever the umask: the token is in there, and the scripts that the jobs run.
        folder.mkdir(mode=0o700, exist_ok=True)
        log_path(run_dir, "trainer").parent.mkdir(exist_ok=True)
    for name, text in scripts(plan).items():
        write_file(folder / name, text)
    write_token(run_dir, token)
    remove_tasks(run_dir)
    training = submit(training_words(plan))
    try:
        array = submit(instances_words(plan, training))
    except BaseException:
        # Ctrl-C, too: without its instances it would wait in vain.
        cancel(training)
        raise
    instances = [f"instance-{i}" for i in range(plan.max_instances)]
    tasks = [Task("trainer", "trainer", id=training, log=str(log_path(run_dir, "trainer")))]
    tasks += [
        Task(name, "instance", id=f"{array}_{i}", log=str(log_path(run_dir, name))) for i, name in enumerate(instances)
    ]
    write_launch(run_dir, "slurm", tasks)
    return training, array


def _require_no_jobs(run_dir: Path) -> None:
    """Two launches of a run would share its scripts, its records and its instances' names."""
    if not (run_dir / LAUNCH_FILE).exists() or (launch := read_launch(run_dir)).engine != "slurm":
        return
    queued = {job.id.partition("_")[0] for job in own_jobs()}
    jobs = {(task.id or "").partition("_")[0] for task in launch.tasks} & queued
    if jobs:
        raise RunDirInUse(
            f"run.dir {str(run_dir)!r} has jobs in Slurm's queue: {', '.join(sorted(jobs))}; wait for their end, or "
            f"`scancel {' '.join(sorted(jobs))}`, or name another directory"
        )


def make_parser() -> Parser:
    parser = Parser(
        "async-rl launch slurm",
        "Writes the job scripts of a run to run.dir/slurm and submits them: a job that trains, an array of instances.",
        "CONFIG [--dry-run] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the scripts and what is wrong; write and submit nothing"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    stop_on_signals()
    try:
        config = load_config(arguments.config, parser.overrides)
        plan = plan_cluster(arguments.config, config, parser.overrides)
        if arguments.dry_run:
            print(describe(plan), flush=True)
            require_sound(config, trains=True, serves=True)
            return 0
        require_slurm()
        require_sound(config, trains=True, serves=True)
        training, array = launch(plan, os.environ.get("ASYNC_RL_TOKEN"))
    except (Stopped, AsyncRLError) as end:
        return explain_end(end)
    run_dir = config.run.dir
    print(
        f"submitted: training job {training}, instances {array} (an array of {plan.max_instances})\n"
        f"follow it:       async-rl status --run {shlex.quote(str(run_dir))}\n"
        f"save and end it: scancel --batch --signal=INT {training}\n"
        f"end it at once:  scancel {training} {array}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
