"""The text of `async-rl check`: config, processes, memory, publish and tokens. Plain lines if it is no terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.checks.forecast.memory import MIB, ProcessMemory
from async_rl.checks.forecast.run_forecast import RunForecast
from async_rl.config.keys import as_toml
from async_rl.config.secrets import masked_words
from async_rl.config.sources import DEFAULT, SourcedValue
from deploy.cluster.plan import ClusterPlan
from deploy.local.memory_fit import GIB, Capacity
from deploy.local.plan import Plan, describe

PIPE_WIDTH = 160
"""Columns of the tables if the output is not a terminal."""


def show_check(
    values: Sequence[SourcedValue],
    plan: Plan | None,
    cluster_plan: ClusterPlan | None,
    forecast: RunForecast | None,
    capacity: Capacity | None,
    warnings: Sequence[str],
    notes: Sequence[str] = (),
    num_left_out: int = 0,
) -> None:
    """Prints all parts there are, notes and warnings last; `num_left_out` further settings have their defaults."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH, highlight=False)
    _title(console, "config")
    _show_values(console, values)
    if num_left_out:
        console.print(Text(f"  {num_left_out} more have their defaults, which --all shows", style="dim"))
    if plan is not None or cluster_plan is not None:
        _title(console, "processes")
    if plan is not None:
        console.print(_indented(describe(plan)), markup=False, soft_wrap=True)
    if cluster_plan is not None:
        console.print(_indented(_describe_tasks(cluster_plan)), markup=False, soft_wrap=True)
    if forecast is not None:
        _show_forecast(console, forecast, plan, cluster_plan, capacity)
    for note in notes:
        console.print(Text(f"\n{note}"), soft_wrap=True)
    for warning in warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)


def show_verdict(num_warnings: int, *, is_elsewhere: bool, is_ready: bool) -> None:
    """The last line of a check that has found no error."""
    where = "where it is meant to" if is_elsewhere else "here: async-rl run"
    can = f"can run {where}" if is_ready else "is sound, but cannot run yet: files are missing"
    warned = f"; {num_warnings} warning{'s' if num_warnings > 1 else ''} above" if num_warnings else ""
    Console(highlight=False).print(Text(f"\nverdict: this config {can}{warned}", style="bold"), soft_wrap=True)


def _show_values(console: Console, values: Sequence[SourcedValue]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("key", "value", "source"):
        table.add_column(column, overflow="fold")
    for each in values:
        style = "dim" if each.source == DEFAULT else ""
        table.add_row(Text("  " + each.name), Text(_as_toml(each.value)), Text(each.source), style=style)
    console.print(table)


def _as_toml(value: Any) -> str:
    return "-" if value is None else as_toml(value, _plain)


def _plain(value: Any) -> Any:
    """Tables of the config are models, paths are text."""
    return value.model_dump(exclude_defaults=True) if hasattr(value, "model_dump") else str(value)


def _show_forecast(
    console: Console,
    forecast: RunForecast,
    plan: Plan | None,
    cluster_plan: ClusterPlan | None,
    capacity: Capacity | None,
) -> None:
    num_instances = len(plan.instances) if plan else cluster_plan.min_instances if cluster_plan else 0
    _title(console, f"memory of each training rank, of {forecast.num_ranks} (forecast)")
    _show_memory(console, forecast.rank)
    _title(console, f"memory of each instance{f', of {num_instances}' if num_instances else ''} (forecast)")
    _show_memory(console, forecast.instance)
    if capacity is not None:
        host = capacity.host
        device = f", {capacity.device_bytes / GIB:.1f} GiB on each device" if capacity.device_bytes else ""
        console.print(
            f"  this machine: {host.total_bytes / GIB:.1f} GiB, {host.available_bytes / GIB:.1f} GiB of it free{device}"
        )
    _title(console, "each iteration")
    model = forecast.model
    console.print(f"  model      {model.num_parameters:,} parameters, {model.num_active_parameters:,} used by a token")
    console.print(f"  publish    {_size(forecast.publish_bytes)} to each instance")
    console.print(
        f"  tokens     up to {forecast.max_response_tokens:,} sampled, after up to {forecast.max_prompt_tokens:,} of "
        f"prompts; up to {forecast.max_fed_rows:,} rows for the trainer, prompts once"
    )


def _show_memory(console: Console, memory: ProcessMemory) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("reason", overflow="fold")
    for part in memory.counted:
        table.add_row("  " + part.name, _size(part.num_bytes), Text(part.reason, style="dim"))
    for part in memory.phases:
        if part not in memory.counted:
            table.add_row(f"  ({part.name}", f"{_size(part.num_bytes)})", Text("not at the same time", style="dim"))
    table.add_row("  total", Text(_size(memory.num_bytes), style="bold"), "")
    for part in memory.on_host:
        table.add_row("  " + part.name, _size(part.num_bytes), Text(f"in host memory; {part.reason}", style="dim"))
    console.print(table)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.0f} MiB"


def _describe_tasks(plan: ClusterPlan) -> str:
    """The tasks of a cluster's launcher, whose commands depend on where they run: `async-rl launch --dry-run`."""

    def resources(cores: int, devices: int, kind: str) -> str:
        return f"{cores} cores, {f'{devices} {kind} devices' if devices else 'CPU'}"

    node, instance = plan.node, plan.instance
    most = f" to {plan.max_instances}" if plan.max_instances > plan.min_instances else ""
    return (
        f"training node x {plan.num_nodes}\n"
        f"  ranks    {plan.ranks_per_node}\n"
        f"  each     {resources(node.cores, node.devices, node.kind)}\n"
        f"  ports    of the first node: torchrun {plan.master_port}\n"
        f"producer x 1\n"
        f"  started  by rank 0 on the first node, within its cores, and again when it is lost\n"
        f"  ports    fleet endpoint {plan.fleet_port}; for the ranks a free one\n"
        f"instance x {plan.min_instances}{most}\n"
        f"  each     {resources(instance.cores, instance.devices, instance.kind)}"
    )


def _indented(text: str) -> str:
    """Below a title, with secrets masked: commands have whatever the config has."""
    return "\n".join("  " + " ".join(masked_words(line.split(" "))) for line in text.splitlines())


def _title(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]")
