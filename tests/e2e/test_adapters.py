"""A whole run that trains adapters: killed at both ends, on-policy, and exported through the command line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from tests.support.local_run import Run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ITERATIONS = 6
SETTINGS = (
    f"--train.iterations={ITERATIONS}",
    "--checkpoint.every=1",
    "--adapter.rank=4",
    "--optimizer.learning_rate=0.02",
    "--algorithm.kl_coef=0.05",
)


def export(run: Run, to: Path, *words: str) -> None:
    command = [sys.executable, "-m", "trainer.export", run.dir, "--to", to, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["adapters", pytest.param("merged", marks=pytest.mark.nightly)])
def test_a_run_with_adapters_goes_on_after_kills_and_ends_as_what_is_exported(
    form: str, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    base = tiny_model("qwen3", tied=True)
    run = Run(tmp_path, base)
    run.start(*SETTINGS, f"--adapter.publish={form}", f"--publish.snapshot_dir={tmp_path / 'snapshots'}")
    run.wait_for_iterations(2)
    run.instances()[0].kill()
    run.wait_for_iterations(3)
    run.kill_trainer()
    assert run.finish() == 0, run.everything_said()
    assert [row["iteration"] for row in run.lines("ledger.jsonl")] == list(range(ITERATIONS))
    # In float32, in which merging rounds little.
    rows = run.lines("metrics.jsonl")
    assert all(row["max_logprob_gap"] < 1e-4 for row in rows)
    shares = [row.get("merged_share") for row in rows]
    if form == "merged":
        assert shares[0] == 0 and min(shares[1:]) > 0.9
    else:
        assert set(shares) == {None}, "nothing is merged"
    export(run, tmp_path / "adapters")
    export(run, tmp_path / "merged", "--merge")
    merged, model = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", run.dir / "model"))
    assert all(torch.equal(merged[name], tensor) for name, tensor in model.items())
    start = load_file(base / "model.safetensors")
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(merged["model.norm.weight"], start["model.norm.weight"])
    joined = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").merge_and_unload().state_dict()
    for name, tensor in model.items():
        torch.testing.assert_close(joined[name], tensor, rtol=1e-5, atol=1e-6)
    assert "library_name: peft" in (tmp_path / "adapters/README.md").read_text()
