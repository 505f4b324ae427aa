"""Runs with a reserve of prompts on real parts: whatever happens to them, the same groups are trained."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_tokenizer import make_chat_model
from tests.support.local_run import Run
from tests.support.same_run import assert_same_run

# Each test has three runs, one after the other.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

RESERVE = 5
SETTINGS = (
    *("--train.iterations=5", "--train.order=prompt", f"--prompts.reserve={RESERVE}", "--checkpoint.every=1"),
    *("--inference.num_instances=2", "--algorithm.kl_coef=0.05"),
)

PROGRAM = '''
import asyncio
import random


async def rollout(prompt, policy):
    """Two turns; the rollouts of every third prompt have the same reward, and no two runs the same order of them."""
    first = await policy.generate(list(prompt.messages), max_tokens=12)
    await asyncio.sleep(random.uniform(0, 0.1))
    second = await policy.generate([*prompt.messages, first.message, {"role": "user", "content": "on"}], max_tokens=8)
    if int(prompt.prompt_id) % 3 == 0:
        return 0.0
    return sum(letter in "aeiou" for letter in first.text + second.text) / 10
'''


@pytest.fixture
def make_run(new_run: Callable[[str], Run]) -> Callable[[str], Run]:
    def make(name: str) -> Run:
        run = new_run(name)
        run.config.write_text(run.config.read_text().replace(":vowels", ":uneven"))
        return run

    return make


def finish(run: Run) -> None:
    assert run.finish() == 0, run.everything_said()


def selections(run: Run) -> list[Any]:
    return [proof["selection"] for proof in run.lines("ledger.jsonl")]


def require_selected(run: Run) -> None:
    """Every third prompt was drawn and left out, and as many were trained as without a reserve."""
    records, proofs = run.lines("metrics.jsonl"), run.lines("ledger.jsonl")
    assert all(proof["on_policy"] and proof["num_groups"] == 6 for proof in proofs)
    left_out = [record["num_left_out"] for record in records]
    assert sum(left_out) > len(records), left_out
    assert [proof["selection"]["num_left_out"] for proof in proofs] == left_out
    for record in records:  # The others' rewards are 0.
        assert (record["reward_mean_drawn"] < record["reward_mean"]) == (record["num_left_out"] != 0)
    rows = run.lines("timeline.jsonl")
    trained = [int(row["prompt_id"]) for row in rows if row.get("is_trained", True)]
    not_trained = [row for row in rows if not row.get("is_trained", True)]
    assert len(not_trained) == sum(left_out) and all(int(row["prompt_id"]) % 3 == 0 for row in not_trained)
    assert all(
        row["reward_mean"] == 0.0 and row["num_response_tokens"] and not row["logprob_gaps"] for row in not_trained
    )
    num_without_signal = sum(selection["num_without_signal"] for selection in selections(run))
    assert sum(number % 3 == 0 for number in trained) == num_without_signal


@pytest.mark.parametrize(
    "layout",
    [("--trainer.num_processes=2", "--prompts.pass_over=2"), ("--trainer.tensor_parallel=2", "--prompts.pass_over=2")],
    ids=["two leaders", "one leader of two ranks"],
)
def test_a_killed_instance_and_a_resumed_run_train_what_an_undisturbed_one_does(
    make_run: Callable[[str], Run], layout: Sequence[str]
) -> None:
    undisturbed, run = make_run("undisturbed"), make_run("run")
    undisturbed.start(*SETTINGS, *layout)
    finish(undisturbed)
    require_selected(undisturbed)

    run.start(*SETTINGS, *layout, "--train.iterations=3")
    run.wait_for_iterations(1)
    run.instances()[0].kill()
    finish(run)
    run.start(*SETTINGS, *layout, "--run.resume=true")
    finish(run)
    assert_same_run(run, undisturbed)
    assert selections(run) == selections(undisturbed)
    proofs, expected = run.lines("ledger.jsonl"), undisturbed.lines("ledger.jsonl")
    assert [proof["history_sha256"] for proof in proofs] == [proof["history_sha256"] for proof in expected]
    assert len({proof["history_sha256"] for proof in proofs}) == len(proofs)
    assert proofs[-1]["num_passed_over"] > 0, "more than the forty prompts were drawn"


def test_rollout_programs_are_selected_from_alike_in_every_order(new_run: Callable[[str], Run], tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "chat")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    runs = [new_run("run"), new_run("again")]
    for run in runs:
        lines = run.config.read_text().splitlines()
        kept = [line for line in lines if not line.startswith(("path =", "chat_template", "name ="))]
        text = "\n".join(kept).replace("[model]", f'[model]\npath = "{model}"')
        run.config.write_text(
            text.replace("[reward]", f'program = "python:{program}:rollout"\nrenderer = "qwen3"\n[reward]')
        )
        run.start(*SETTINGS, "--train.iterations=3")
        finish(run)
        require_selected(run)
    assert_same_run(*runs)
    assert selections(runs[0]) == selections(runs[1])


def test_every_order_and_mode_selects_the_same_groups(make_run: Callable[[str], Run]) -> None:
    # So small a step changes no sample: those of all runs can be compared in each iteration.
    settings = (*SETTINGS, "--train.iterations=3", "--optimizer.learning_rate=1e-9")
    others = {
        "prompt": (),
        "completion": ("--train.order=completion",),
        "synchronous": ("--train.mode=synchronous", "--algorithm.name=reinforce_pp_baseline"),
    }
    runs = {name: make_run(name) for name in others}
    for name, run in runs.items():
        run.start(*settings, *others[name])
        finish(run)
        require_selected(run)
    assert selections(runs["completion"]) == selections(runs["synchronous"]) == selections(runs["prompt"])
