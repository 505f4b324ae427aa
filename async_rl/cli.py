"""The `async-rl` command: replaces itself by the program of the subcommand, which it does not import."""

import os
import sys

from async_rl import __version__
from async_rl.errors import ConfigError
from async_rl.shared.programs.parts import PARTS, require_part

PROGRAMS = {
    "quickstart": ("deploy.quickstart", "a small model learns on this machine, both pools included"),
    "init": ("deploy.init", "write the config of a first run: async-rl init MODEL DATA [-o run.toml]"),
    "check": ("deploy.local.check", "what a run would be and need, and what is wrong with it: async-rl check CONFIG"),
    "doctor": ("deploy.doctor", "what this machine lacks, and the commands that mend it: async-rl doctor [CONFIG]"),
    "run": ("deploy.local.run", "start instances and trainer of a config on this machine: async-rl run CONFIG"),
    "verify": ("deploy.verify", "show on your own set-up that the period changes nothing: async-rl verify CONFIG"),
    "audit": ("trainer.audit", "does an engine serve this checkpoint: async-rl audit --engine URL --checkpoint DIR"),
    "launch": ("deploy.launch", "start a run on a cluster: async-rl launch ray|slurm|kubernetes CONFIG [--dry-run]"),
    "status": ("deploy.status", "the tasks, instances and progress of a run: async-rl status [--run RUN_DIR]"),
    "watch": ("deploy.watch", "the live view of a run that goes on or is over: async-rl watch RUN"),
    "plan": ("deploy.scaling", "what limits a run, and what other numbers of devices would do: async-rl plan RUN"),
    "calibrate": ("deploy.scaling.calibrate", "the same from two short runs of a config: async-rl calibrate CONFIG"),
    "trace": ("deploy.trace", "the last periods of a run for Perfetto: async-rl trace RUN [-o FILE] [--last N]"),
    "dashboard": ("async_rl.parts.dashboard", "runs in a browser, live: async-rl dashboard RUN [RUN2 ...]"),
    "report": ("async_rl.parts.dashboard.report", "the same page as one file: async-rl report RUN [RUN2 ...] -o FILE"),
    "samples": (
        "async_rl.parts.dashboard.sample_list",
        "prompts, responses, rewards: async-rl samples RUN [--worst N]",
    ),
    "export": ("trainer.export", "write a run's checkpoint for inference: async-rl export RUN --to DIR"),
    "serve": ("inference_service", "start one inference instance: async-rl serve --model PATH"),
    "fleet": (
        "async_rl.rollouts.fleet.cli",
        "the instances of a run that goes on: async-rl fleet ls | add | drain | remove",
    ),
    "eval": ("deploy.local.evaluate", "score a model on a data set: async-rl eval MODEL --data SOURCE --reward NAME"),
}

USAGE = "usage: async-rl COMMAND [ARGUMENTS]\n\n" + "\n".join(
    f"  {name:<12}{description}" for name, (_, description) in PROGRAMS.items()
)


def main() -> None:
    """Entry point of the console script; `async-rl COMMAND --help` shows a command's own options."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "--version":
        print(__version__)
    elif command in PROGRAMS:
        module, _ = PROGRAMS[command]
        try:
            for part in (part for part, package in PARTS.items() if module.startswith(package)):
                require_part(part)
        except ConfigError as error:
            from async_rl.shared.programs.command_line import USAGE_ERROR

            print(f"async-rl {command}: {error}", file=sys.stderr)
            sys.exit(USAGE_ERROR)
        # For this program and all that it starts: files and folders of the working directory, such as random.py or
        # trainer/, must not replace modules of the same name.
        os.environ["PYTHONSAFEPATH"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "async_rl.shared.programs.start", module, *arguments])
    else:
        # What these import takes longer than all else here, and is needed by mistakes only.
        from async_rl.config.keys import nearest
        from async_rl.shared.programs.command_line import USAGE_ERROR

        near = nearest(command, PROGRAMS)
        meant = f"did you mean {near!r}? " if near else ""
        print(
            f"async-rl: unknown command {command!r}: {meant}expected one of {', '.join(PROGRAMS)}\n\n{USAGE}",
            file=sys.stderr,
        )
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
