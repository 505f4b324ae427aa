"""Submits a config to Kubernetes: `async-rl launch kubernetes CONFIG [--section.key VALUE ...]`.

The plan of the run becomes values of the chart, in a file that stays beside the run's records, and Helm installs or
upgrades the release. What happens then is Kubernetes' own: docs/deployment_kubernetes.md.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed
from async_rl.shared.files import write_file
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from deploy.cluster.plan import plan_cluster
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.kubernetes.values import ENGINES, chart_values, for_pods, release_name

CHART: Final = Path(__file__).with_name("chart")


def make_parser() -> Parser:
    parser = Parser(
        "async-rl launch kubernetes",
        "Installs a run on the Kubernetes cluster of the current context, as a release of Helm, and ends. A release of "
        "the same name is upgraded.",
        "CONFIG [--values FILE] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, with paths as pods see them")
    parser.add_argument(
        "--values", type=Path, action="append", default=[], metavar="FILE", help="the cluster's values: images, volume"
    )
    parser.add_argument("--name", help="of the release (default: the name of the run's directory)")
    parser.add_argument("--namespace", help="of the release (default: that of the current context)")
    parser.add_argument(
        "--engine", choices=ENGINES, default="jobset", help="what starts the pods' work (default: %(default)s)"
    )
    parser.add_argument("--hosts-per-instance", type=int, default=1, help="pods of one instance; vllm only")
    parser.add_argument("--out", type=Path, help="where the values are written (default: kubernetes in run.dir)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the manifests, or without helm the values and its command; write and change nothing",
    )
    return parser


def helm_command(action: Sequence[str], release: str, namespace: str | None, files: Sequence[Path | str]) -> list[str]:
    """The command line of Helm for the chart; later files take precedence."""
    words = ["helm", *action, release, str(CHART)]
    words += ["--namespace", namespace] if namespace else []
    for file in files:
        words += ["--values", str(file)]
    return words


def as_text(values: Mapping[str, Any]) -> str:
    """Values as JSON that Helm, which reads it as YAML, understands: without pairs of surrogates for one character, and
    without characters that YAML wants escaped."""
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    return "".join(
        char if char.isprintable() or char == "\n" or ord(char) > 0xFFFF else f"\\u{ord(char):04x}" for char in text
    )


def show(values: dict[str, Any], release: str, namespace: str | None, files: Sequence[Path]) -> None:
    """Prints what would be installed.

    Raises:
        ProcessFailed: helm refuses the values.
    """
    text = as_text(values)
    if shutil.which("helm") is None:
        print(text, end="")
        print(f"# helm is not installed; with it: {shlex.join(_upgrade(release, namespace, ['VALUES', *files]))}")
        return
    _run(helm_command(["template"], release, namespace, ["-", *files]), stdin=text)


def install(values: dict[str, Any], release: str, namespace: str | None, files: Sequence[Path], out: Path) -> None:
    """Writes the values and has Helm install them.

    Raises:
        ConfigError: there is no helm, or the values cannot be written.
        ProcessFailed: helm failed.
    """
    if shutil.which("helm") is None:
        raise ConfigError("helm is not installed: install Helm 3.14 or newer, or look at the values with --dry-run")
    written = out / "values.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {str(out)!r}: {error.strerror}; name another directory with --out") from error
    write_file(written, as_text(values))
    _run(_upgrade(release, namespace, [written, *files]))


def _upgrade(release: str, namespace: str | None, files: Sequence[Path | str]) -> list[str]:
    return helm_command(["upgrade", "--install"], release, namespace, files)


def _run(command: Sequence[str], stdin: str | None = None) -> None:
    done = subprocess.run(command, input=stdin, text=True, stderr=subprocess.PIPE)
    if done.returncode:
        raise ProcessFailed(f"{shlex.join(command)} failed with code {done.returncode}: {done.stderr.strip()}")


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    stop_on_signals()
    try:
        config = load_config(options.config, parser.overrides)
        plan = plan_cluster(options.config, for_pods(config), parser.overrides)
        release = release_name(options.name or plan.name)
        values = chart_values(
            plan,
            options.config.read_text(encoding="utf-8"),
            release=release,
            engine=options.engine,
            hosts_per_instance=options.hosts_per_instance,
        )
        if options.dry_run:
            show(values, release, options.namespace, options.values)
        else:
            install(values, release, options.namespace, options.values, options.out or config.run.dir / "kubernetes")
    except Stopped as end:
        return explain_end(end)
    except AsyncRLError as error:
        print(f"async-rl launch kubernetes: {type(error).__name__}: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
