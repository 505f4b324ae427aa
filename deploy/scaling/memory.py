"""Which splits and layouts have room on devices of a size, by the forecast of `async-rl check`."""

import math
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from async_rl.checks.forecast.run_forecast import RunForecast, forecast_run
from async_rl.checks.preflight.layout import require_layout
from async_rl.checks.preflight.model import read_shape
from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.records.run_records import object_in
from deploy.local.memory_fit import GIB, device_need_bytes

WAYS = (1, 2, 4, 8)
"""Of tensor and of pipeline parallelism that are tried."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of one replica: the fewest ranks with this recomputation that have room."""

    recompute: str
    tensor_parallel: int
    pipeline_parallel: int
    rank_bytes: int


class DeviceMemory:
    """What a run with other numbers of replicas, or of another layout, needs of its devices."""

    def __init__(self, run_dir: Path, device_bytes: int) -> None:
        """
        Raises:
            ConfigError: the config is none of this release, or a model of the run cannot be found.
        """
        self.device_bytes = device_bytes
        file = run_dir / "config.json"
        self._config = parse_config(dict(object_in(file)), source=str(file))
        self._model = read_shape(self._config.model.path)
        self.instance_bytes = forecast_run(self._config, self._model).instance.num_bytes

    def fits(self, num_replicas: int, placement: Literal["separate", "turns"] = "separate") -> bool:
        """Whether a rank and an instance do, each on a device of its own, or both in turns."""
        found = self._forecast(num_replicas)
        if found is None:
            return False
        config, forecast = found
        run = config.run.model_copy(update={"placement": placement})
        return device_need_bytes(config.model_copy(update={"run": run}), forecast) <= self.device_bytes

    def rank_bytes(self, num_replicas: int) -> int | None:
        """None where so many do not form the groups of ranks that share the experts."""
        found = self._forecast(num_replicas)
        return None if found is None else found[1].rank.num_bytes

    def layouts(self, most: int = max(WAYS) ** 2) -> list[Layout]:
        """Those of one replica of `most` ranks that have room, the fewest ranks with each recomputation."""
        found = []
        ways = sorted(product(WAYS, WAYS), key=lambda pair: (math.prod(pair), -pair[0]))
        for recompute in ("none", "selective", "full"):
            for tensor, pipeline in (pair for pair in ways if math.prod(pair) <= most):
                layout = {"recompute": recompute, "tensor_parallel": tensor, "pipeline_parallel": pipeline}
                forecast = self._forecast(1, **layout)
                if forecast is not None and (need := forecast[1].rank.num_bytes) <= self.device_bytes:
                    found.append(Layout(recompute, tensor, pipeline, need))
                    break
        return found

    def require_room(self) -> None:
        """
        Raises:
            ConfigError: an instance has none, which no split and no layout of the trainer changes.
        """
        if self.instance_bytes > self.device_bytes:
            raise ConfigError(
                f"an instance needs {self.instance_bytes / GIB:.1f} GiB, and --device-gib is "
                f"{self.device_bytes / GIB:g}: set inference.tensor_parallel, lower inference.max_concurrency, or name "
                "larger devices"
            )

    def no_split(self, num_devices: int) -> ConfigError:
        """That no number of replicas has room, and what would."""
        need = self.rank_bytes(1)
        said = "" if need is None else f"a rank of one replica needs {need / GIB:.1f} GiB, and "
        fitting = "; ".join(map(described, self.layouts(num_devices - 1))) or "none of those that were tried"
        return ConfigError(
            f"no split of {num_devices} devices has room: {said}--device-gib is {self.device_bytes / GIB:g}; layouts "
            f"of a replica that have: {fitting}; calibrate one of them"
        )

    def text(self, num_replicas: int) -> str:
        need = self.rank_bytes(num_replicas)
        of_rank = "" if need is None else f", a rank {need / GIB:.1f} GiB with replicas: {num_replicas}"
        layouts = [f"  {described(layout)}" for layout in self.layouts()] or ["  none of those that were tried"]
        return "\n".join(
            (
                "",
                f"memory, as async-rl check forecasts it: an instance {self.instance_bytes / GIB:.1f} GiB{of_rank}"
                + ("" if self.fits(num_replicas) else ": no room"),
                f"layouts of a replica with room in {self.device_bytes / GIB:g} GiB, whose costs calibrate tells:",
                *layouts,
            )
        )

    def figures(self, num_replicas: int) -> dict[str, Any]:
        """The same for JSON; bytes."""
        return {
            "device_bytes": self.device_bytes,
            "instance_bytes": self.instance_bytes,
            "rank_bytes": self.rank_bytes(num_replicas),
            "layouts": list(map(asdict, self.layouts())),
        }

    def _forecast(self, num_replicas: int, **layout: object) -> tuple[Config, RunForecast] | None:
        """None if so many replicas of this layout cannot be."""
        trainer = self._config.trainer.model_copy(update=layout)
        trainer = trainer.model_copy(update={"num_processes": num_replicas * trainer.ranks_per_replica})
        cluster = self._config.cluster.model_copy(update={"training_nodes": 1})
        config = self._config.model_copy(update={"trainer": trainer, "cluster": cluster})
        try:
            require_layout(trainer, self._model, trainer.num_local_ranks)
            return config, forecast_run(config, self._model)
        except ConfigError:
            return None


def described(layout: Layout) -> str:
    return (
        f"tensor_parallel {layout.tensor_parallel}, pipeline_parallel {layout.pipeline_parallel}, recompute "
        f'"{layout.recompute}" ({layout.rank_bytes / GIB:.1f} GiB)'
    )
