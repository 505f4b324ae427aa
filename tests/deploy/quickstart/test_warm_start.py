"""The warm start and the evaluation as programs, cut very short."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deploy.quickstart.evaluate import measure
from deploy.quickstart.kind import KINDS
from deploy.quickstart.splits import read_rows
from deploy.quickstart.supervised import answer_logprobs, expected_accuracy, teach
from deploy.quickstart.task import make_splits, make_tokenizer
from deploy.quickstart.warm_start import COURSE, examples, make_model


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("quickstart")
    options = ["--seed", "1", "--run-dir", str(made), "--max-steps", str(2 * COURSE.check_every)]
    subprocess.run([sys.executable, "-m", "deploy.quickstart.warm_start", *options], check=True, timeout=120)
    return made


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_warm_start_leaves_a_model_that_evaluate_reads(run_dir: Path) -> None:
    rows = run_dir / "data" / "held_out.jsonl"
    record = measure(KINDS["spelling"], run_dir / "base_model", rows, run_dir / "evaluation", Console())
    assert record["num_prompts"] == 1000
    assert 0.0 <= record["accuracy"] < 0.1
    first = read_rows(rows)[:12]
    assert [sample["question"] for sample in record["samples"]] == [row["word"] for row in first]
    for sample, row in zip(record["samples"], first, strict=True):
        assert sample["answer"] == row["answer"]
        assert sample["correct"] == (sample["response"] == row["answer"])
    # A random model ends a response at any token with a chance of about one in the vocabulary's size.
    assert any(sample["response"] is None for sample in record["samples"])


@pytest.mark.distributed
def test_a_warm_start_logs_its_checks(run_dir: Path) -> None:
    checks = [json.loads(line) for line in (run_dir / "warm_start.jsonl").read_text().splitlines()]
    assert [check["step"] for check in checks] == [COURSE.check_every, 2 * COURSE.check_every]
    assert checks[1]["loss"] < checks[0]["loss"]


@pytest.mark.distributed
def test_held_out_words_are_not_among_the_prompts(run_dir: Path) -> None:
    held_out = {row["word"] for row in read_rows(run_dir / "data" / "held_out.jsonl")}
    assert held_out.isdisjoint(row["word"] for row in read_rows(run_dir / "data" / "prompts.jsonl"))


def test_a_warm_start_stops_at_its_target() -> None:
    torch.manual_seed(0)
    tokenizer, splits = make_tokenizer(), make_splits(0)
    train, validation = examples(tokenizer, splits.warm_start[:100]), examples(tokenizer, splits.validation[:8])
    checks = teach(make_model(tokenizer), train, validation, replace(COURSE, target_accuracy=0.0), seed=0)
    assert [check.step for check in checks] == [COURSE.check_every]


def test_expected_accuracy_is_the_mean_probability_of_the_answers() -> None:
    torch.manual_seed(0)
    tokenizer, row = make_tokenizer(), make_splits(0).validation[0]
    model = make_model(tokenizer)
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = tokenizer(row["answer"] + tokenizer.eos_token)["input_ids"]
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    expected = [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]
    (example,) = examples(tokenizer, [row])
    longer = replace(example, answer_ids=(*example.answer_ids, *example.answer_ids))
    logprobs_N, owners_N = answer_logprobs(model, [longer, example])
    assert logprobs_N[owners_N == 1].tolist() == pytest.approx(expected, abs=1e-5)
    assert (owners_N == 0).sum() == 2 * len(answer)
    assert expected_accuracy(model, [example, example]) == pytest.approx(torch.tensor(expected).sum().exp().item())
