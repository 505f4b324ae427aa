"""Whether the forecast memory of a run is there on this machine; for `deploy.local.check`."""

from dataclasses import dataclass

from async_rl.checks.forecast.instance_memory import PUBLISH, vllm_device_share
from async_rl.checks.forecast.run_forecast import RunForecast
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


def find_misfits(config: Config, forecast: RunForecast, capacity: Capacity) -> Misfits:
    """What does not fit: an error if it cannot, a warning if other programs have what it would need."""
    errors, warnings = [], []
    needed, host = host_bytes(config, forecast), capacity.host
    if needed > host.total_bytes:
        errors.append(
            ConfigError(
                f"the run needs about {needed / GIB:.1f} GiB of this host's memory, which has "
                f"{host.total_bytes / GIB:.1f} GiB: {REMEDY}"
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
                errors.append(_device_error(f"a {name} needs", memory.num_bytes, capacity.device_bytes))
        if config.inference.engine == "vllm" and not errors:
            errors += _publish_errors(config, forecast, capacity.device_bytes)
        if config.run.placement != "separate" and not errors:
            errors += _shared_device_errors(config, forecast, capacity.device_bytes)
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


def _shared_device_errors(config: Config, forecast: RunForecast, device_bytes: int) -> list[ConfigError]:
    """Of a rank and an instance on one device, as each of them has it for itself in the forecast.

    Where they take turns one of them has left only the base of its process there.
    """
    rank, instance = forecast.rank.num_bytes, forecast.instance.num_bytes
    rank_aside, instance_aside = forecast.rank.base_bytes, forecast.instance.base_bytes
    turns_need = max(rank + instance_aside, rank_aside + instance)
    takes_turns = config.run.placement == "turns"
    beside = rank_aside if takes_turns else rank
    if config.inference.engine == "vllm":
        # It fills what it may have, whatever the run needs.
        share, fits = vllm_device_share(config.inference.engine_options), 1 - beside / device_bytes
        if share > fits and beside + instance <= device_bytes:
            return [
                ConfigError(
                    f"vLLM takes {share:.0%} of the device, of which a training rank needs {1 - fits:.0%}: add "
                    f'"--gpu-memory-utilization", "{int(fits * 100) / 100}" or less to inference.engine_options'
                )
            ]
    if takes_turns:
        who = "a training rank and an instance, in turns, need"
        return [] if turns_need <= device_bytes else [_device_error(who, turns_need, device_bytes)]
    if rank + instance > device_bytes:
        remedy = f"set run.placement to 'turns', or {REMEDY}" if turns_need <= device_bytes else REMEDY
        return [_device_error("a training rank and an instance need", rank + instance, device_bytes, remedy)]
    return []


def _device_error(who: str, num_bytes: int, device_bytes: int, remedy: str = REMEDY) -> ConfigError:
    return ConfigError(
        f"{who} about {num_bytes / GIB:.1f} GiB of its device, which has {device_bytes / GIB:.1f} GiB: {remedy}"
    )
