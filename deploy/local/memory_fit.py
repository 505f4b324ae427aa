"""Whether the forecast memory of a run is there on this machine; for `deploy.local.check`."""

from dataclasses import dataclass

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.forecast.memory import ProcessMemory
from async_rl.forecast.run_forecast import RunForecast
from deploy.local.machine_memory import HostMemory

GIB = 2**30

REMEDY = (
    "lower trainer.micro_batch_tokens or inference.max_concurrency, set trainer.recompute, use more devices "
    "(trainer.tensor_parallel, pipeline_parallel), or a smaller model"
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
        return ranks * forecast.rank.num_bytes + instances * forecast.instance.num_bytes
    return ranks * forecast.rank.host_bytes


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
                errors.append(_device_error(name, memory, capacity.device_bytes))
    return Misfits(tuple(errors), tuple(warnings))


def _device_error(name: str, memory: ProcessMemory, device_bytes: int) -> ConfigError:
    return ConfigError(
        f"a {name} needs about {memory.num_bytes / GIB:.1f} GiB of its device, which has {device_bytes / GIB:.1f} GiB: "
        f"{REMEDY}"
    )
