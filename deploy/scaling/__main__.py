"""`async-rl plan RUN [RUN ...] [--devices N]`: what limits a run, and how long its iterations would take with others.

Reads the records of runs that go on or are over. `async-rl plan --graph CONFIG` shows the stages of a group. Exit
codes: 0 success, 2 no such run or config, or not enough of it.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text
from deploy.local.memory_fit import GIB
from deploy.scaling import chart, graph
from deploy.scaling.batches import TURNS, Batches, devices_of
from deploy.scaling.costs import Measured, measure
from deploy.scaling.failures import Failures, Kind, failures_of
from deploy.scaling.iterations import LARGEST, checkpoint_every
from deploy.scaling.memory import DeviceMemory
from deploy.scaling.simulation import ASSUMED, SCHEDULES, Outcome, SetUp
from deploy.scaling.what_if import LEAST, MOST_CHANGES, SWITCHES, Changes, ways_of, with_changes, with_costs, without

Schedules = dict[str, float]
"""Seconds of an iteration with each schedule, and with pools that take turns."""

RESTART_S = 120.0

APART = 1.05
"""Times of a set-up that differ more, by the costs that the records allow, are shown both."""


def limit_of(mean: Outcome) -> str:
    """Which part an iteration waits for."""
    if max(mean.idle_training, mean.idle_inference) < 0.1:
        return "balanced"
    return "rollouts" if mean.idle_training > mean.idle_inference else "training"


def text_of(run: Measured, batches: Batches, set_ups: Sequence[SetUp], as_run: Schedules | None = None) -> str:
    """`as_run`: what the schedules take where nothing is switched, if something is."""
    costs, ratios = run.costs, run.ratios
    lines = [
        f"measured over {len(run.iterations)} iterations, of which every other one was fitted:",
        f"  instance   {_s(costs.step_s)} a decoding step and {_s(costs.token_s)} for each running response, "
        f"{_s(costs.prompt_token_s)} a token of a prompt; scored {_s(costs.score_s)} after the last one",
        f"  replica    {_s(costs.window_s)} a window and {_s(costs.row_s)} for each row",
        f"  both at once: a step takes {costs.slower_decoding:.2f} times as long, a window {costs.slower_training:.2f}",
        f"  iteration  step {_s(costs.optimizer_s)}, publish {_s(costs.publish_s)} to one instance and "
        f"{_s(costs.passing_s)} for each further one, between {_s(costs.between_s)}",
        f"  simulated / measured, of the others: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}",
        "",
        "instances  replicas  devices         iteration  tokens/s  per device  training waits  instances idle  limit",
    ]
    lines += [_row(run, batches, set_up) for set_up in dict.fromkeys(set_ups)]
    best, taken = _best(set_ups), schedules_of(run, batches, _best(set_ups))
    lines += ["", f"schedules with instances: {best.num_instances}, replicas: {best.num_replicas}"]
    turns = "both pools on all devices; no swaps" + ("" if batches.turns_fit(devices_of(run, best)) else "; no room")
    notes = {"one step behind": " (trains samples of older weights; not offered)", TURNS: f" ({turns})"}
    for name, seconds in taken.items():
        share = f"{seconds / taken['periodic']:.2f} of periodic{notes.get(name, '')}"
        before = "" if as_run is None else f"; as the run does {_s(as_run[name])}"
        lines.append(f"  {name:<16}{_s(seconds):>9}  {share}{before}")
    if run.chained_bytes:
        lines += ["", _text_of_publish(run, batches, best)]
    return "\n".join([*lines, "", "taken for granted: " + "; ".join(ASSUMED)])


def schedules_of(run: Measured, batches: Batches, set_up: SetUp) -> Schedules:
    taken: Schedules = {schedule: batches.mean(replace(set_up, schedule=schedule)).seconds for schedule in SCHEDULES}
    return {**taken, TURNS: batches.mean(batches.turns(devices_of(run, set_up))).seconds}


def _text_of_publish(run: Measured, batches: Batches, set_up: SetUp) -> str:
    found = ways_of(run, set_up.num_instances)
    share = found["chain"] / batches.mean(set_up).seconds
    text = f"publish to instances: {set_up.num_instances}: {_s(found['chain'])}, {share:.1%} of the iteration"
    if "tree" in found:
        text += f"; through a tree {_s(found['tree'])}, one after the other {_s(found['star'])}"
    return text


def _best(set_ups: Sequence[SetUp]) -> SetUp:
    """After the run's own the best one comes, if there is any."""
    return set_ups[0] if len(set_ups) == 1 else set_ups[1]


def _row(run: Measured, batches: Batches, set_up: SetUp) -> str:
    mean, is_now = batches.mean(set_up), set_up == run.set_up
    devices, (least, most) = devices_of(run, set_up), batches.between(set_up)
    seconds = f"{_s(least)} to {_s(most)}" if most > APART * least else _s(mean.seconds)
    return (
        f"{set_up.num_instances:>9}  {set_up.num_replicas:>8}  {devices:>7}  {seconds:>16}  "
        f"{mean.tokens_per_s:>8,.0f}  {mean.tokens_per_s / devices:>10,.1f}  {mean.idle_training:>14.0%}  "
        f"{mean.idle_inference:>14.0%}  {limit_of(mean)}{', as it is' if is_now else ''}"
    )


def _s(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:,.0f} s"
    return f"{seconds / 1e-6:.3g} us" if seconds >= 1e-9 else "0 s"


def _figures(mean: Outcome) -> dict[str, float]:
    return {name: getattr(mean, name) for name in ("seconds", "tokens_per_s", "idle_training", "idle_inference")}


def text_of_failures(failures: Failures, mtbf_hours: float, every: int) -> str:
    def line(name: str, kind: Kind) -> str:
        return f"  {name:<16}every {kind.iterations:,.3g} iterations, {_s(kind.cost_s)} each time"

    return "\n".join(
        (
            "",
            f"failures, of a device every {mtbf_hours:g} h: {failures.share:.2%} of the time",
            line("an instance", failures.instances),
            line("training", failures.training) + f", with a checkpoint every {every} iterations",
        )
    )


def json_of(
    run: Measured,
    batches: Batches,
    set_ups: Sequence[SetUp],
    failures: Failures | None = None,
    memory: DeviceMemory | None = None,
    as_run: Schedules | None = None,
    changes: Changes | None = None,
) -> dict[str, Any]:
    """Everything that the text has, by the names of `Costs`, `SetUp` and `Outcome`; the first set-up is the run's."""
    turns = batches.turns(devices_of(run, _best(set_ups)))
    return {
        "costs": asdict(run.costs),
        "num_iterations": len(run.iterations),
        "simulated_to_measured": list(run.ratios),
        "set_ups": [
            {
                **asdict(set_up),
                "devices": devices_of(run, set_up),
                **_figures(batches.mean(set_up)),
                "between": batches.between(set_up),
            }
            for set_up in set_ups
        ],
        "turns": {**asdict(turns), **_figures(batches.mean(turns))},
        "schedules": schedules_of(run, batches, _best(set_ups)),
        "as_the_run": as_run,
        "publish": ways_of(run, _best(set_ups).num_instances) if run.chained_bytes else None,
        "changes": None if changes is None else changes._asdict(),
        "failures": None if failures is None else asdict(failures),
        "memory": None if memory is None else memory.figures(_best(set_ups).num_replicas),
        "assumed": list(ASSUMED),
    }


def show_graph(config: Path, overrides: Sequence[str], output: Path | None) -> None:
    """
    Raises:
        ConfigError: the config is not usable, or the picture cannot be written.
    """
    pipeline = load_config(config, overrides).graph
    if output is None:
        print(graph.text_of(pipeline))
        return
    _write(output, graph.svg_of(pipeline))


def _write(output: Path, svg: str) -> None:
    try:
        output.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {str(output)!r} cannot be written: {error.strerror}; name another file") from error


def make_parser() -> Parser:
    parser = Parser(
        "async-rl plan",
        "Simulates a run's iterations with other numbers of instances and replicas, from what its records say.",
        "RUN [RUN ...] [OPTIONS], or async-rl plan --graph CONFIG [-o FILE.svg] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument(
        "run",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run.dir of a run that goes on or is over, and of others of the same model and hardware; or a config",
    )
    parser.add_argument("--graph", action="store_true", help="show the stages of a group, of the config that is named")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to draw an SVG: the stages, or the devices"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="find the best split of so many among both pools")
    parser.add_argument("--instances", type=int, metavar="N", help="simulate so many; by default as many as now")
    parser.add_argument("--replicas", type=int, metavar="N", help="simulate so many; by default as many as now")
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of a batch; by default as many as now")
    parser.add_argument("--responses", type=int, metavar="N", help="responses to a prompt; by default as many as now")
    parser.add_argument("--mtbf-hours", type=float, metavar="H", help="what failures cost, if a device has one every H")
    parser.add_argument(
        "--restart-s", type=float, metavar="S", help=f"until it is back, by default {RESTART_S:g}; with --mtbf-hours"
    )
    parser.add_argument(
        "--cost",
        action="append",
        default=[],
        metavar="NAME=S",
        help="what if: seconds in place of a measured cost, as publish_s=0.5, of those that --json names",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=SWITCHES,
        help="simulate replicas that get the groups at their indices (dock), or instances that do (tail)",
    )
    parser.add_argument(
        "--changes", type=float, metavar="SHARE", help="publish changes, so much of all bytes, where faster"
    )
    parser.add_argument("--device-gib", type=float, metavar="G", help="leave out what does not fit devices of so much")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


def parsed(parser: Parser, argv: Sequence[str]) -> Namespace:
    """The options; ends the program where they do not go together."""
    options: Namespace = parser.parse_args(argv)
    for name in ("devices", "instances", "replicas", "prompts", "responses"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} is {value}: expected at least 1")
    if options.devices and (options.instances or options.replicas):
        parser.error("--devices finds the numbers of instances and replicas itself: leave these out")
    for name in ("mtbf_hours", "restart_s", "device_gib"):
        if (value := getattr(options, name)) is not None and not LEAST <= value <= LARGEST:
            parser.error(f"--{name.replace('_', '-')} is {value}: expected a positive number")
    if (share := options.changes) is not None and not LEAST <= share <= MOST_CHANGES:
        parser.error(
            f"--changes is {share}: expected a share of the bytes, above 0 and at most {MOST_CHANGES:g}, beyond which "
            "all weights are sent"
        )
    if options.restart_s is not None and options.mtbf_hours is None:
        parser.error("--restart-s is of failures: add --mtbf-hours, how often a device has one")
    others = vars(options).keys() - {"run", "graph", "output"}
    if options.graph and (given := sorted(name for name in others if getattr(options, name))):
        named = f"--{given[0].replace('_', '-')}"
        parser.error(f"{named} is for the records of a run, and --graph shows a config: leave one of them out")
    if options.graph and options.run[1:]:
        parser.error(f"{str(options.run[1])!r} is a second config: --graph shows one")
    if not options.graph and parser.overrides:
        parser.error(f"{parser.overrides[0]} is for --graph CONFIG: add --graph")
    if options.output and not (options.graph or options.devices):
        parser.error("-o is for --graph CONFIG, or for --devices N: add --graph or --devices")
    return options


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parsed(parser, argv)
    try:
        if options.graph:
            show_graph(options.run[0], parser.overrides, options.output)
            return 0
        plain = with_costs(measure(*options.run), options.cost)
        run, changes = without(plain, options.without), None
        if options.changes is not None:
            run, changes = with_changes(run, options.run[0], options.changes)
        memory = DeviceMemory(options.run[0], int(options.device_gib * GIB)) if options.device_gib else None
        batches = Batches(run, options.prompts, options.responses, memory)
        set_ups, as_run = [run.set_up], None
        if options.devices:
            set_ups += batches.splits(options.devices)
        elif options.instances or options.replicas:
            set_ups.append(
                replace(
                    run.set_up,
                    num_instances=options.instances or run.set_up.num_instances,
                    num_replicas=options.replicas or run.set_up.num_replicas,
                )
            )
        if run != plain:
            usual = Batches(plain, options.prompts, options.responses, memory)
            own = replace(_best(set_ups), has_dock=plain.set_up.has_dock, has_tail=plain.set_up.has_tail)
            as_run = schedules_of(plain, usual, own)
        if options.output:
            _write(options.output, chart.svg_of(batches.by_devices(options.devices)))
        failures, every, restart_s = None, checkpoint_every(options.run[0]), options.restart_s or RESTART_S
        if options.mtbf_hours:
            failures = failures_of(run, batches, _best(set_ups), 3600 * options.mtbf_hours, restart_s, every)
    except AsyncRLError as error:
        print(f"async-rl plan: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        print(json.dumps(json_of(run, batches, set_ups, failures, memory, as_run, changes)))
        return 0
    print(text_of(run, batches, set_ups, as_run))
    if changes is not None:
        print(changes.text)
    if failures is not None:
        print(text_of_failures(failures, options.mtbf_hours, every))
    if memory is not None:
        print(memory.text(_best(set_ups).num_replicas))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
