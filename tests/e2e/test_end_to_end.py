"""The whole system on real parts: instances and trainer as processes, a few iterations, and what may go wrong."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.local_run import Run, command_of, gone

pytestmark = pytest.mark.distributed


@pytest.fixture
def run(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Run]:
    run = Run(tmp_path, tiny_model("qwen3", tied=True))
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.terminate()
        run.process.wait(30)


def assert_proven(run: Run, iterations: int, groups: int = 6) -> None:
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(iterations))
    assert all(proof["on_policy"] for proof in proofs)
    assert all(proof["num_groups"] == groups and proof["num_responses"] == 4 * groups for proof in proofs)
    assert len({proof["weight_version"] for proof in proofs}) == iterations
    assert len({proof["fingerprint"] for proof in proofs}) == iterations, "every step changes the weights"


def test_a_run_learns_on_policy_and_leaves_a_loadable_model(run: Run) -> None:
    run.start()
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, 3)
    records = run.lines("metrics.jsonl")
    assert len(records) == 3
    assert all(record["max_logprob_gap"] < 1e-3 for record in records)
    assert list((run.dir / "tensorboard").iterdir())
    groups = [(row["iteration"], row["index"]) for row in run.lines("timeline.jsonl")]
    assert groups == [(iteration, place) for iteration in range(3) for place in range(6)]
    samples = run.lines("samples.jsonl")
    assert [(row["iteration"], row["index"]) for row in samples] == [divmod(i, 3) for i in range(9)]
    assert all(row["prompt"] == f"Word {row['prompt_id']}: " for row in samples), samples
    model = AutoModelForCausalLM.from_pretrained(run.dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.dir / "model")
    tokens = torch.tensor([tokenizer("Word 1: ")["input_ids"]])
    assert model(tokens).logits.isfinite().all()


def test_in_exact_mode_every_log_prob_is_that_of_the_rollout(run: Run, reproducible_products: None) -> None:
    run.start("--train.exact=true")
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, 3)
    assert [record["max_logprob_gap"] for record in run.lines("metrics.jsonl")] == [0.0, 0.0, 0.0]


EVALUATION = """
[evaluation]
every = 2
max_delay_s = 5.0
[[evaluation.sets]]
name = "held-out"
source = "{source}"
num_samples = 2
max_prompts = 4
"""


def test_the_idle_pool_evaluates_the_version_in_training(run: Run, tmp_path: Path) -> None:
    with run.config.open("a") as config:
        config.write(EVALUATION.format(source=tmp_path / "rows.jsonl"))
    run.start("--train.iterations", "6")
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, 6)
    records = run.lines("evaluations.jsonl")
    assert [record["iteration"] for record in records] == [0, 2, 4]
    versions = {proof["iteration"]: proof["weight_version"] for proof in run.lines("ledger.jsonl")}
    assert all(record["weight_version"] == versions[record["iteration"]] for record in records)
    assert max(record["num_prompts"] for record in records) == 4, records
    assert all(("pass@2" in record) == record["complete"] == (record["num_prompts"] == 4) for record in records)


def test_two_replicas_and_two_instances_share_each_batch(run: Run) -> None:
    run.start("--trainer.num_processes", "2", "--inference.num_instances", "2")
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, 3)


@pytest.mark.parametrize(
    "layout",
    [
        ("--trainer.tensor_parallel", "2", "--trainer.sequence_parallel", "true", "--algorithm.kl_coef", "0.05"),
        ("--trainer.pipeline_parallel", "2", "--train.steps_per_batch", "2", "--algorithm.old_policy", "model"),
    ],
)
def test_the_whole_loop_runs_on_a_divided_model(run: Run, layout: tuple[str, ...]) -> None:
    run.start(*layout, "--inference.num_instances", "2", "--trainer.micro_batch_tokens", "100")
    assert run.finish() == 0, run.everything_said()
    steps = 2 if "--train.steps_per_batch" in layout else 1
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [i for i in range(3) for _ in range(steps)]
    assert all(proof["on_policy"] and proof["num_groups"] == 6 // steps for proof in proofs)
    assert all(record["max_logprob_gap"] < 1e-3 for record in run.lines("metrics.jsonl"))
    assert AutoModelForCausalLM.from_pretrained(run.dir / "model") is not None


def test_experts_on_two_ranks_are_published_and_proven(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    run = Run(tmp_path, tiny_model("qwen3_moe"))
    run.start("--trainer.expert_parallel", "2", "--trainer.num_processes", "2")
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, 3)
    assert AutoModelForCausalLM.from_pretrained(run.dir / "model").config.model_type == "qwen3_moe"


def test_synchronous_mode_and_prompt_order_run_too(run: Run) -> None:
    run.start("--train.mode", "synchronous", "--train.order", "prompt", "--algorithm.kl_coef", "0.05")
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, 3)
    assert all(record["kl"] >= 0 for record in run.lines("metrics.jsonl"))


def test_an_instance_that_dies_mid_batch_loses_nothing(run: Run) -> None:
    run.start(
        *("--inference.num_instances", "2", "--train.iterations", "12", "--rollout.max_response_tokens", "96"),
        *("--reward.name", f"python:{run.reward}:slow", "--cluster.max_restarts", "0"),
    )
    run.wait_for_iterations(2)
    run.instances()[0].kill()
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, 12)
    assert [record["num_instances"] for record in run.lines("metrics.jsonl")][-1] == 1


def test_a_run_without_instances_left_ends_in_a_named_error_in_time_and_can_go_on(run: Run) -> None:
    run.start(
        *("--train.iterations", "500", "--pool.timeout_s", "3", "--checkpoint.every", "1"),
        *("--cluster.max_restarts", "0"),
    )
    run.wait_for_iterations(2)
    for instance in run.instances():
        instance.kill()
    assert run.finish() != 0
    assert "NoInstanceLeft" in run.everything_said() or "PublishError" in run.everything_said()
    num_trained = len(run.lines("ledger.jsonl"))
    run.start("--train.iterations", str(num_trained + 2), "--checkpoint.every", "1", "--run.resume", "true")
    assert run.finish() == 0, run.everything_said()
    assert_proven(run, num_trained + 2)


@pytest.mark.parametrize("when", ["starting", "training"])
def test_ctrl_c_leaves_no_process_behind(run: Run, when: str) -> None:
    run.start("--train.iterations", "500")
    if when == "training":
        run.wait_for_iterations(1)
    else:
        run.wait_for_descendants(2)
    family = run.descendants()
    assert family
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.finish(30) != 0
    assert gone(family), [command_of(p) for p in family if p.is_running()]


@pytest.mark.parametrize("tensor_parallel", ["1", "2"])
def test_a_reward_that_raises_ends_the_run_and_names_prompt_and_reward(run: Run, tensor_parallel: str) -> None:
    """On two ranks the one without rollouts learns of it, too, and does not wait for ever."""
    run.start("--reward.name", f"python:{run.reward}:broken", "--trainer.tensor_parallel", tensor_parallel)
    assert run.finish() != 0
    said = run.output.read_text()
    assert "RewardError" in said and "broken" in said and "no such column" in said, run.everything_said()
    assert not run.lines("metrics.jsonl"), "no step was taken"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("--model.path", "/no/such/model"), "/no/such/model"),
        (("--prompts.source", "/no/such/rows.jsonl"), "/no/such/rows.jsonl"),
        (("--trian.iterations", "3"), "unknown key 'trian"),
        (("--prompts.column", "question"), "'question'"),
        (("--rollout.max_response_tokens", "500"), "more than the model's 256 positions"),
    ],
)
def test_bad_input_is_named_before_any_training(run: Run, override: tuple[str, str], message: str) -> None:
    run.start(*override)
    assert run.finish(60) != 0
    assert message in run.output.read_text(), run.everything_said()
    assert "Traceback" not in run.output.read_text(), run.everything_said()


def test_a_directory_with_another_run_in_it_is_refused(run: Run) -> None:
    run.dir.mkdir()
    (run.dir / "ledger.jsonl").write_text("{}\n")
    run.start()
    assert run.finish(60) != 0
    assert "holds the records of another run" in run.output.read_text(), run.everything_said()
    assert (run.dir / "ledger.jsonl").read_text() == "{}\n"
