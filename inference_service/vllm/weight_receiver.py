"""Handles a weight stream in a vLLM worker: joins the trainer's group, receives, and feeds the model's loader; or saves
adapters, which vLLM loads from a directory.

The adapters of `weight_adapters.py` call it; nothing here needs vLLM.
"""

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from async_rl.shared.protocol.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_fingerprint
from async_rl.shared.protocol.inference import AdapterInfo, InitInfo, UpdateInfo
from async_rl.shared.weights.fingerprint import TensorSpec
from inference_service.weight_transfer.receiver import WeightReceiver, announced_specs

NamedTensors = list[tuple[str, torch.Tensor]]
LoadWeights = Callable[[NamedTensors], object]

BATCH_BYTES = 256 * 2**20
"""Maximum size of a batch passed to the loader, unless a single tensor is larger."""

_LAYER = re.compile(r"^.*?\.\d+\.")


ADAPTERS = "adapters-"
"""Begins the names of their directories, in TMPDIR: that of our launcher's vLLM ends with it."""


@dataclass(frozen=True, slots=True)
class SavedAdapters:
    """Adapters that were received completely: where they are, on this host, and their fingerprint."""

    directory: Path
    fingerprint: str


class WorkerReceiver:
    """The receiving end of one worker. `worker_rank` numbers all workers of the instance, also data-parallel ones."""

    def __init__(self, worker_rank: int) -> None:
        self._worker_rank = worker_rank
        self._receiver = WeightReceiver()
        self._has_whole_weights = False
        self._adapters: SavedAdapters | None = None
        self._kept: list[Path] = []

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the last stream that was received completely."""
        return self._receiver.fingerprint if self._adapters is None else self._adapters.fingerprint

    @property
    def has_whole_weights(self) -> bool:
        """Whether it has received others than those of its checkpoint."""
        return self._has_whole_weights

    @property
    def adapters(self) -> SavedAdapters | None:
        """Those that came last; None if whole weights came since, or nothing."""
        return self._adapters

    def join(self, info: InitInfo) -> None:
        """Joins the group `info` names, with this worker's own rank.

        Raises:
            PublishError: the rendezvous did not complete within `info.timeout_s`.
        """
        self._receiver.join(info.model_copy(update={"rank_offset": info.rank_offset + self._worker_rank}))

    def load(self, update: UpdateInfo, load_weights: LoadWeights) -> None:
        """Receives the announced tensors and passes them on, at most a layer at a time.

        After an error during the transfer the group is left, because its members no longer agree on the position in the
        stream: join a new one and send the whole stream again.

        Raises:
            RequestRefused: the announcement contradicts itself; nothing was received.
            PublishError: there is no group or snapshot to read from, or the transfer failed.
        """
        specs = announced_specs(update)
        self._has_whole_weights, self._adapters = True, None
        try:
            with closing(self._receiver.stream(update, specs)) as stream:
                for batch in in_batches(stream, dict(zip(update.names, update.stages or (), strict=False))):
                    load_weights(batch)
        except Exception:
            self._receiver.leave()
            raise

    def load_adapters(self, update: UpdateInfo) -> None:
        """Receives factors of adapters, and saves them as peft does in a directory of their own, for vLLM's loader.

        Raises:
            RequestRefused: the announcement contradicts itself; nothing was received.
            PublishError: there is no group or snapshot to read from, or the transfer failed.
        """
        info, specs = update.adapter, announced_specs(update)
        assert info is not None, "these are adapters"
        try:
            with closing(self._receiver.stream(update, specs)) as stream:
                factors = {spec.name: tensor.cpu().clone() for spec, tensor in stream}
        except Exception:
            self._receiver.leave()
            raise
        assert self._receiver.fingerprint is not None, "a stream has passed"
        fingerprint = adapter_fingerprint(self._receiver.fingerprint, info.base, {info.scale})
        directory = Path(tempfile.mkdtemp(prefix=ADAPTERS))
        save_adapters(factors, info, directory)
        self._adapters = SavedAdapters(directory, fingerprint)
        # vLLM may read the present ones again until the new ones are loaded.
        for old in self._kept[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        self._kept = [*self._kept[-1:], directory]

    def leave(self) -> None:
        """Closes the group, if there is one."""
        self._receiver.leave()


def save_adapters(factors: Mapping[str, torch.Tensor], info: AdapterInfo, directory: Path) -> None:
    """Writes what peft's `from_pretrained` and vLLM read."""
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": info.rank,
        "lora_alpha": info.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
        "inference_mode": True,
    }
    save_file(dict(factors), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(content))


def in_batches(
    stream: Iterable[tuple[TensorSpec, torch.Tensor]], stages: Mapping[str, int], max_bytes: int = BATCH_BYTES
) -> Iterator[NamedTensors]:
    """Cuts the stream where a layer ends, and within a layer before it exceeds `max_bytes`.

    vLLM finishes a module once all its tensors have arrived, and keeps them until then.

    Args:
        stages: of the tensors by name, where each stage's come in order and those of several beside each other.
    """
    batches: dict[int, NamedTensors] = {}
    sizes, layers = Counter[int](), dict[int, str]()
    for spec, tensor in stream:
        stage, found = stages.get(spec.name, 0), _LAYER.match(spec.name)
        layer = found[0] if found else ""
        if stage in batches and (layer != layers[stage] or sizes[stage] + spec.num_bytes > max_bytes):
            yield batches.pop(stage)
            sizes[stage] = 0
        batches.setdefault(stage, []).append((spec.name, tensor))
        sizes[stage] += spec.num_bytes
        layers[stage] = layer
    yield from batches.values()
