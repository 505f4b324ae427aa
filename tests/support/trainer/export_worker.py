"""One rank of `test_weight_export.py`, started by torchrun: loads and streams models under several layouts.

Arguments: a JSON file with [{"checkpoint", "layout", "bucket_bytes"}, ...], and an output directory. The main
rank compares every stream with the checkpoint's file; every rank reports how much memory a stream took.
"""

import ctypes
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from async_rl.checks.preflight.model import read_shape
from async_rl.config.trainer_section import TrainerSection
from async_rl.shared.weights.fingerprint import Stream
from tests.support.trainer.own_stores import OwnStores
from trainer.devices import choose_device
from trainer.hf.checkpoint import save_hf_checkpoint
from trainer.hf.weight_export import WeightExport
from trainer.hf.weights import load_hf_weights
from trainer.model.gpt import build_model
from trainer.parallel import init_parallel

ABANDONED_AFTER = 3


def memory_bytes(field: str) -> int:
    """A memory value of this process from /proc: current VmRSS, or VmHWM, the peak since `reset_peak`."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    # Freed memory that malloc keeps would hide the next allocations.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def check_stream(stream: Stream, original: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are wrong or missing, empty if all are right."""
    wrong = {name for name in original if not name.endswith("e_score_correction_bias")}
    for spec, tensor in stream:
        if torch.equal(tensor, original[spec.name]) and spec.shape == tuple(original[spec.name].shape):
            wrong.discard(spec.name)
    return sorted(wrong)


def check_by_stage(export: WeightExport, checkpoint: Path, rank: int) -> list[str]:
    """The same of what this rank sends alone."""
    if not export.is_sender:
        export.serve(by_stage=True)
        return []
    number = export.senders.index(rank)
    own = {spec.name for spec, each in zip(export.specs, export.sender_of_each, strict=True) if each == number}
    original = load_file(checkpoint / "model.safetensors")
    return check_stream(export.stream(by_stage=True), {name: original[name] for name in own})


def abandon_stream(export: WeightExport) -> None:
    with closing(export.stream()) as stream:
        for _ in range(ABANDONED_AFTER):
            next(stream)


def peak_of_a_stream(export: WeightExport, is_main: bool) -> int:
    """Bytes above the previous level at the peak of one stream whose tensors are not kept."""
    reset_peak()
    before = memory_bytes("VmRSS")
    if is_main:
        for _ in export.stream():
            pass
    else:
        export.serve()
    return memory_bytes("VmHWM") - before


def run_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    section = TrainerSection(**case["layout"])
    parallel = init_parallel(choose_device("cpu"), 0, section)
    checkpoint = Path(case["checkpoint"])
    model = build_model(read_shape(checkpoint), torch.float32, parallel, section)
    load_hf_weights(model, checkpoint)
    export = WeightExport(model, case["bucket_bytes"])
    report: dict[str, Any] = {"names": [spec.name for spec in export.specs]}
    if parallel.is_main:
        original = load_file(checkpoint / "model.safetensors")
        abandon_stream(export)
        report["wrong"] = check_stream(export.stream(), original)
        del original
    else:
        export.serve()
        export.serve()
    report["wrong by stage"] = check_by_stage(export, checkpoint, parallel.rank)
    report["senders"] = export.senders
    save_hf_checkpoint(model, checkpoint, out)
    report["num_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    report["peak_bytes"] = parallel.gather_json(peak_of_a_stream(export, parallel.is_main))
    parallel.close()
    return report


def main(cases: Path, out: Path) -> None:
    torch.set_num_threads(1)
    reports = []
    stores = OwnStores()
    for number, case in enumerate(json.loads(cases.read_text())):
        stores.begin()
        reports.append(run_case(case, out / str(number)))
    (out / f"reports{os.environ['RANK']}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
