"""Instances are diagnosed in every iteration, and the worst diagnosis of each stays."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from async_rl.method.proof.gap_limits import NoiseLimits, noise_scale
from async_rl.method.types import Group
from trainer.verify.diagnosis import Diagnosis
from trainer.verify.recording import INSTANCES, Findings, RecordingRank

URL = "http://a"
LIMITS = NoiseLimits(noise_scale("float32"))
SOUND = Diagnosis(300, 1e-6, score_sigmas=0.5, log_temperature_error=0.05)
WORSE = Diagnosis(300, 1e-6, score_sigmas=-4.0, log_temperature_error=0.05)
FEW = Diagnosis(9, 1e-6, detail="9 tokens, of 256 that are needed")
WRONG = Diagnosis(300, 1e-6, "temperature", "samples as at 0.5", 9.0, 0.05, 0.5, is_of_sampling=True)


def diagnosed(run_dir: Path, *of_batches: Diagnosis) -> Any:
    findings = Findings(run_dir, LIMITS)
    for found in of_batches:
        findings.add({}, {URL: found})
    findings.write()
    return json.loads((run_dir / INSTANCES).read_text())[URL]["diagnosis"]


def test_the_worst_diagnosis_stays(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, SOUND, WORSE, SOUND)["score_sigmas"] == -4.0
    assert diagnosed(tmp_path, SOUND, WRONG, WORSE)["cause"] == "temperature"
    assert diagnosed(tmp_path, FEW, SOUND, FEW)["score_sigmas"] == 0.5
    assert diagnosed(tmp_path, FEW)["score_sigmas"] is None


def test_an_instance_that_lies_only_in_its_second_iteration_is_found(tmp_path: Path) -> None:
    found = iter([SOUND, WRONG, SOUND])
    num_asked = 0

    def diagnose(_: Sequence[Group]) -> Mapping[str, Diagnosis]:
        nonlocal num_asked
        num_asked += 1
        return {URL: next(found)}

    publication = SimpleNamespace(instances=(URL,))
    inner = SimpleNamespace(
        publish_weights=lambda: publication, gather=lambda rows: list(rows), optimizer_step=lambda: None
    )
    rollouts, control = SimpleNamespace(groups=[]), SimpleNamespace(call=lambda name: [])
    rank = RecordingRank(
        cast(Any, inner), cast(Any, rollouts), (URL,), diagnose, LIMITS, tmp_path, control=cast(Any, control)
    )
    for _ in range(3):
        rank.publish_weights()
        rank.gather([])
        rank.optimizer_step()
        # Of several steps of a batch: these weights did not sample it.
        rank.gather([])
    assert num_asked == 3
    assert json.loads((tmp_path / INSTANCES).read_text())[URL]["diagnosis"]["cause"] == "temperature"
