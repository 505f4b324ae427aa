"""Whether the forecast memory of a run is there on this machine; for `deploy.local.check`."""

from dataclasses import dataclass

from async_rl.checks.forecast.instance_memory import PUBLISH, vllm_device_share
from async_rl.checks.forecast.run_forecast import RunForecast, forecast_run
from async_rl.checks.preflight.adapter import PROPOSED_RANK, proposed_adapters
from async_rl.config.keys import as_toml
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.local.machine_memory import HostMemory

GIB = 2**30

PRODUCER_BYTES = 200 * 2**20
"""The producer, 111 MiB, and a worker of a reward, 20 to 75 MiB (measured on a CPU)."""

REMEDY = (
    "lower trainer.micro_batch_tokens or inference.max_concurrency, set trainer.recompute, use more devices "
    "(trainer.tensor_parallel, pipeline_parallel; context_parallel for activations), or a smaller model"
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory there is; `device_bytes` is that of one device, None on a CPU or where it is unknown."""

    host: HostMemory
    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Misfits:
    errors: tuple[ConfigError, ...]
    warnings: tuple[str, ...]


def host_bytes(config: Config, forecast: RunForecast) -> int:
    """Of all processes of a run on one host: all their memory on a CPU, else what they keep beside their devices."""
    ranks, instances = config.trainer.num_local_ranks, config.inference.num_instances
    if config.trainer.device == "cpu":
        return ranks * forecast.rank.num_bytes + instances * forecast.instance.num_bytes + PRODUCER_BYTES
    return ranks * forecast.rank.host_bytes + PRODUCER_BYTES


def device_need_bytes(config: Config, forecast: RunForecast) -> int:
    """The most that a run takes of one device. Where both pools take turns on it, one of them has left only the base of
    its process there."""
    rank, instance = forecast.rank, forecast.instance
    return {
        "separate": max(rank.num_bytes, instance.num_bytes),
        "shared": rank.num_bytes + instance.num_bytes,
        "turns": max(rank.num_bytes + instance.base_bytes, rank.base_bytes + instance.num_bytes),
    }[config.run.placement]


def describe_need(config: Config, forecast: RunForecast) -> str:
    """What a run needs, in words."""
    host = f"{host_bytes(config, forecast) / GIB:.1f} GiB of the host's memory"
    on_device = f"{device_need_bytes(config, forecast) / GIB:.1f} GiB of a device and "
    return host if config.trainer.device == "cpu" else on_device + host


def with_adapters(config: Config, forecast: RunForecast) -> tuple[Config, RunForecast] | None:
    """The same run with adapters in place of all weights; None if it has them, or cannot have them."""
    adapter = proposed_adapters(forecast.model, config.trainer.tensor_parallel)
    if config.adapter.is_given or adapter is None or config.train.exact:
        return None
    adapted = config.model_copy(update={"adapter": adapter})
    return adapted, forecast_run(adapted, forecast.model)


def find_misfits(config: Config, forecast: RunForecast, capacity: Capacity) -> Misfits:
    """What does not fit: an error if it cannot, a warning if other programs have what it would need.

    Where adapters would fit, an error says so.
    """
    found = _misfits(config, forecast, capacity, REMEDY)
    adapted = with_adapters(config, forecast) if found.errors else None
    if adapted is None or _misfits(*adapted, capacity, REMEDY).errors:
        return found
    targets = as_toml(list(adapted[0].adapter.targets))
    remedy = (
        f"train adapters in place of all weights (adapter.rank = {PROPOSED_RANK}, adapter.targets = {targets}, ten "
        f"times the optimizer.learning_rate), with which the run needs {describe_need(*adapted)}; or {REMEDY}"
    )
    return _misfits(config, forecast, capacity, remedy)


def _misfits(config: Config, forecast: RunForecast, capacity: Capacity, remedy: str) -> Misfits:
    errors, warnings = [], []
    needed, host = host_bytes(config, forecast), capacity.host
    if needed > host.total_bytes:
        errors.append(
            ConfigError(
                f"the run needs about {needed / GIB:.1f} GiB of this host's memory, which has "
                f"{host.total_bytes / GIB:.1f} GiB: {remedy}"
            )
        )
    elif needed > host.available_bytes:
        warnings.append(
            f"the run needs about {needed / GIB:.1f} GiB of memory, and {host.available_bytes / GIB:.1f} GiB of "
            f"{host.total_bytes / GIB:.1f} GiB are free: end other programs first"
        )
    if capacity.device_bytes is not None:
        for name, memory in (("training rank", forecast.rank), ("instance", forecast.instance)):
            if memory.num_bytes > capacity.device_bytes:
                errors.append(_device_error(f"a {name} needs", memory.num_bytes, capacity.device_bytes, remedy))
        if config.inference.engine == "vllm" and not errors:
            errors += _publish_errors(config, forecast, capacity.device_bytes)
        if config.run.placement != "separate" and not errors:
            errors += _shared_device_errors(config, forecast, capacity.device_bytes, remedy)
    return Misfits(tuple(errors), tuple(warnings))


def _publish_errors(config: Config, forecast: RunForecast, device_bytes: int) -> list[ConfigError]:
    """vLLM's cache fills its share of a device to the end, so what a publish takes has to be beside it."""
    share = vllm_device_share(config.inference.engine_options)
    needed = sum(part.num_bytes for part in forecast.instance.phases if part.name == PUBLISH)
    if needed <= (1 - share) * device_bytes:
        return []
    return [
        ConfigError(
            f"vLLM takes {share:.0%} of its device of {device_bytes / GIB:.1f} GiB, and a publish needs "
            f'{needed / GIB:.1f} GiB beside it: add "--gpu-memory-utilization", '
            f'"{int((1 - needed / device_bytes) * 100) / 100}" or less to inference.engine_options'
        )
    ]


def _shared_device_errors(config: Config, forecast: RunForecast, capacity_bytes: int, remedy: str) -> list[ConfigError]:
    """Of a rank and an instance on one device, as each of them has it for itself in the forecast."""
    rank, instance = forecast.rank.num_bytes, forecast.instance.num_bytes
    takes_turns = config.run.placement == "turns"
    beside = forecast.rank.base_bytes if takes_turns else rank
    if config.inference.engine == "vllm":
        # It fills what it may have, whatever the run needs.
        share, fits = vllm_device_share(config.inference.engine_options), 1 - beside / capacity_bytes
        if share > fits and beside + instance <= capacity_bytes:
            return [
                ConfigError(
                    f"vLLM takes {share:.0%} of the device, of which a training rank needs {1 - fits:.0%}: add "
                    f'"--gpu-memory-utilization", "{int(fits * 100) / 100}" or less to inference.engine_options'
                )
            ]
    needed = device_need_bytes(config, forecast)
    if needed <= capacity_bytes:
        return []
    if takes_turns:
        return [_device_error("a training rank and an instance, in turns, need", needed, capacity_bytes, remedy)]
    in_turns = config.model_copy(update={"run": config.run.model_copy(update={"placement": "turns"})})
    if device_need_bytes(in_turns, forecast) <= capacity_bytes:
        remedy = f"set run.placement to 'turns', or {remedy}"
    return [_device_error("a training rank and an instance need", needed, capacity_bytes, remedy)]


def _device_error(who: str, num_bytes: int, capacity_bytes: int, remedy: str) -> ConfigError:
    return ConfigError(
        f"{who} about {num_bytes / GIB:.1f} GiB of its device, which has {capacity_bytes / GIB:.1f} GiB: {remedy}"
    )
