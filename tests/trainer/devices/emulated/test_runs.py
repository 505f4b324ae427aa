"""Whole runs with trainer and embedded instance on emulated NPUs: hccl, canary, checkpoints, Hugging Face files."""

import re
import subprocess
import sys
from collections.abc import Callable
from math import sqrt
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.broken_instance import broken_python, faults_by_url
from tests.support.chat_tokenizer import make_chat_model
from tests.support.devices.emulated.environment import recorded_waits
from tests.support.local_run import Run
from tests.support.rollout_program import use_program
from tests.support.same_run import assert_same_run
from tests.trainer.devices.emulated.conftest import EmulatedRun
from trainer.device_watch import LOST_LIMITS

# The first test of each run waits for all of it.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SETTINGS = ("--train.order=prompt", "--algorithm.kl_coef=0.05", "--checkpoint.every=1")
ITERATIONS = 3
LOST_AFTER_S = 3
PARAMETERS = 18
"""Of Megatron's model: 8 of each layer, the embedding and the last norm."""

GAP = 1e-5
"""Between float32 log-probs of the two devices, relative to their size, and so between gradients."""


@pytest.fixture(scope="module")
def trained(emulated_run: Callable[..., EmulatedRun]) -> EmulatedRun:
    return emulated_run("npu").train(*SETTINGS)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Run:
    return Run(tmp_path_factory.mktemp("cpu"), tiny_model("qwen3", tied=True)).train(*SETTINGS)


def weights(run: Run) -> torch.Tensor:
    tensors = load_file(run.dir / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_every_update_is_on_policy(trained: EmulatedRun) -> None:
    records = trained.run.lines("metrics.jsonl")
    assert len(records) == ITERATIONS and all(record["on_policy"] for record in records)
    # Two float32 computations of the same log-probs; without their waits they would be NaN.
    assert all(record["max_logprob_gap"] < 1e-4 for record in records)
    assert trained.run.checkpoints()[-1].name == f"iteration-{ITERATIONS:06d}"


def assert_trained_alike(run: Run, on_cpu: Run, model: Path) -> None:
    texts, expected = (
        [[response["text"] for response in row["responses"]] for row in each.lines("samples.jsonl")]
        for each in (run, on_cpu)
    )
    assert texts == expected
    start = load_file(model / "model.safetensors")
    before = torch.cat([start[name].flatten() for name in sorted(start)])
    moved, apart = weights(on_cpu) - before, weights(run) - weights(on_cpu)
    # Adam divides a gradient by its own size: where it is at most the gap's part of a usual one, its step may have any
    # sign. That is a share GAP of all weights, each up to two steps apart: sqrt(4 GAP) of the step in root mean square.
    print(f"apart by {float(apart.square().mean().sqrt() / moved.square().mean().sqrt()):.2e} of what they moved")
    assert apart.square().mean().sqrt() < sqrt(4 * GAP) * moved.square().mean().sqrt()


def test_it_trains_what_a_cpu_trains(trained: EmulatedRun, on_cpu: Run, tiny_model: Callable[..., Path]) -> None:
    assert_trained_alike(trained.run, on_cpu, tiny_model("qwen3", tied=True))


@pytest.mark.devices
def test_it_trains_what_a_cpu_trains_under_the_real_mindspeed(
    emulated_run: Callable[..., EmulatedRun], mindspeed: str, on_cpu: Run, tiny_model: Callable[..., Path]
) -> None:
    run = emulated_run("mindspeed", mindspeed=mindspeed).train(*SETTINGS).run
    assert_trained_alike(run, on_cpu, tiny_model("qwen3", tied=True))


def test_the_host_waits_as_often_as_documented(trained: EmulatedRun) -> None:
    def waits(*functions: str) -> dict[str, int]:
        return dict(recorded_waits(trained.folder, *functions))

    of_windows = waits("accumulate", "take_rows")
    assert waits("accumulate", "train") == of_windows, "a window waits for its ledger rows only"
    assert list(of_windows) == ["copy to host"] and ITERATIONS <= of_windows["copy to host"] <= 6 * ITERATIONS
    assert waits("optimizer_step", "totals") == {"copy to host": ITERATIONS}
    # Megatron's own norm of the gradients, which waits once for each parameter where Apex is missing.
    norms = {"item": (PARAMETERS + 1) * ITERATIONS, "blocking copy to device": ITERATIONS}
    assert waits("optimizer_step", "gradient_norm") == norms
    assert waits("optimizer_step") == norms | {"copy to host": ITERATIONS}
    # A publish waits for its fingerprint, on both ends; the first one does so once more with the canary's weights. The
    # multipliers are uploaded once by a process.
    of_fingerprint = {"copy to host": ITERATIONS + 1, "blocking copy to device": 1}
    assert waits("send") == waits("stream", "hexdigest") == of_fingerprint
    # The canary's and the probes'; each `score` waits once.
    assert list(waits("score")) == ["copy to host"]


BF16 = "--model.dtype=bfloat16"
LAYOUTS = {
    "dp2": ("qwen3", BF16, "--trainer.num_processes=2", "--trainer.recompute=selective"),
    "tp2": (
        *("qwen3", BF16, "--trainer.num_processes=2", "--trainer.tensor_parallel=2"),
        "--trainer.recompute=full",
    ),
    "pp2": (
        *("qwen3", BF16, "--trainer.num_processes=2", "--trainer.pipeline_parallel=2", "--publish.transport=stages"),
    ),
    "experts": ("all_experts", BF16),
    "ep2": ("qwen3_moe", "--trainer.num_processes=2", "--trainer.expert_parallel=2"),
    "ppo": (
        *("qwen3", "--algorithm.name=ppo", "--algorithm.options.critic_learning_rate=1e-3", "--algorithm.kl_coef=0.05"),
        *("--train.steps_per_batch=2", "--algorithm.old_policy=model", "--trainer.frozen_weights=host"),
    ),
    "changes": ("qwen3", BF16, "--publish.transport=changes", "--optimizer.learning_rate=1e-6"),
    "snapshot": (
        *("qwen3", "--publish.transport=snapshot", "--algorithm.old_policy=lagged", "--trainer.frozen_weights=host"),
    ),
}
LARGEST_GAPS = {True: 0.2, False: 1e-3}
"""Of log-probs, in bfloat16 and in float32. Where a token chooses experts, bfloat16 has no limit: near a tie it may get
others in either pool, and on a shared prefix all that follows with it."""


@pytest.mark.nightly  # The cover of the matrix and the runs in turns have their kinds, too.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_on_policy(emulated_run: Callable[..., EmulatedRun], layout: str) -> None:
    family, *words = LAYOUTS[layout]
    if layout == "snapshot":
        words += [f"--publish.snapshot_dir={emulated_run('snapshots').folder}"]
    run = emulated_run(layout, family).train(*SETTINGS[:1], *words).run
    records = run.lines("metrics.jsonl")
    assert len(records) == ITERATIONS and all(record["on_policy"] for record in records)
    assert all(record["max_logprob_gap"] < LARGEST_GAPS[BF16 in words] for record in records), records


@pytest.mark.nightly  # Too long for `make test-devices`, and little of it is on the device.
def test_a_program_of_several_turns_is_proven_token_by_token(
    emulated_run: Callable[..., EmulatedRun], tmp_path: Path
) -> None:
    programmed = emulated_run("turns")
    use_program(programmed.run, make_chat_model(tmp_path / "chat"), tmp_path)
    run = programmed.train(*SETTINGS[:2]).run
    records = run.lines("metrics.jsonl")
    assert len(records) == ITERATIONS and all(record["on_policy"] for record in records)
    assert all(record["max_logprob_gap"] < LARGEST_GAPS[False] for record in records)
    assert all(each["turns_max"] == 4 and each["branches_mean"] for each in run.lines("rollouts.jsonl"))


@pytest.mark.nightly  # Too long for `make test-devices`.
def test_verify_finds_that_everything_holds(emulated_run: Callable[..., EmulatedRun]) -> None:
    # Two instances share 24 groups: each has the tokens that a judgement needs, and one of them can be lost.
    words = ("--prompts.prompts_per_batch=24", "--train.order=prompt", "--inference.num_instances=2")
    code, report, said = emulated_run("verified").run.verify("--trainer.device=npu", *words)
    assert code == 0 and report["holds"], said
    assert {finding["outcome"] for finding in report["findings"]} == {"holds"}, said


@pytest.mark.nightly  # Too long for `make test-devices`.
def test_verify_names_what_is_wrong_with_instances_there(
    emulated_run: Callable[..., EmulatedRun], tmp_path: Path
) -> None:
    expected = {"weights": "other weights", "head": "stale head", "temperature": "wrong temperature"}
    python = broken_python(tmp_path / "broken", list(expected))
    code, report, said = emulated_run("broken").run.verify(
        *("--trainer.device=npu", "--quick", "--iterations=1", f"--inference.python={python}"),
        *("--inference.num_instances=3", "--prompts.prompts_per_batch=30", "--rollout.responses_per_prompt=5"),
    )
    assert code == 1, said
    causes = {(f["subject"], f["cause"]) for f in report["findings"] if f["outcome"] == "fails"}
    assert causes == {(url, expected[fault]) for url, fault in faults_by_url(tmp_path / "broken").items()}, said


@pytest.mark.devices
def test_its_checkpoint_is_exported_where_there_is_no_such_device(trained: EmulatedRun, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.export", str(trained.run.dir), "--to", str(tmp_path / "exported")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exported, model = (
        load_file(path / "model.safetensors") for path in (tmp_path / "exported", trained.run.dir / "model")
    )
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in model.items())


@pytest.mark.devices
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    emulated_run: Callable[..., EmulatedRun], trained: EmulatedRun
) -> None:
    killed = emulated_run("killed").run
    killed.start("--trainer.device=npu", *SETTINGS)
    killed.wait_for_iterations(1)
    killed.kill_trainer()
    assert killed.finish() == 0, killed.everything_said()
    assert_same_run(killed, trained.run)


@pytest.mark.nightly  # It waits for a minute and a half; the watch itself is in trainer/test_device_watch.py.
def test_a_kernel_that_hangs_is_named_and_the_run_goes_on_as_if_it_had_not(
    emulated_run: Callable[..., EmulatedRun], trained: EmulatedRun
) -> None:
    """Amid training; the whole run of a sole rank would wait for ever."""
    hung = emulated_run("hung", faults="hang:7000@async_rl.trainer").run
    hung.start("--trainer.device=npu", *SETTINGS, f"--trainer.lost_after_s={LOST_AFTER_S}")
    assert hung.finish(600) == 0, hung.everything_said()
    said = hung.everything_said()
    named = rf"RankLost: .* has not finished on npu:0 for {LOST_LIMITS * LOST_AFTER_S} s .*: a kernel hangs"
    assert re.search(named, said) and "async_rl/loop.py" in said, said
    assert hung.restarts()["trainer"] == 1
    assert_same_run(hung, trained.run)
