"""Two runs compared by their records and models: equal, within a bound, beyond it, and where nothing can be said."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from async_rl.records.findings import Finding, all_hold, fails, holds, not_tested
from deploy.verify.comparison import Comparison, Trained, compared, why_no_gradient, why_no_step

EXACTLY = Comparison(2, "float32", "start", demands_bits=True)
NEARLY = Comparison(2, "float32", "start", demands_bits=False)


def trained(
    norms: Sequence[float | None] = (1.0, 2.0),
    samples: Sequence[Sequence[str]] = (("a", "b"), ("c", "d")),
    model: Path = Path("none"),
    on_policy: bool = True,
    learning_rate: float = 1e-3,
    reward: float = 0.5,
) -> Trained:
    metrics = [
        {"iteration": i, "grad_norm": norm, "loss": norm, "learning_rate": learning_rate}
        for i, norm in enumerate(norms)
    ]
    ledger = [{"iteration": i, "on_policy": on_policy, "samples": "".join(each)} for i, each in enumerate(samples)]
    groups = [
        {"iteration": i, "index": j, "samples": s, "reward_mean": reward}
        for i, each in enumerate(samples)
        for j, s in enumerate(each)
    ]
    return Trained(metrics, ledger, groups, model)


def norms_of(comparison: Comparison, run: Trained, other: Trained) -> Finding:
    return comparison.figures("norms", "grad_norm", run, other, 0.0)


def save_model(path: Path, *values: float) -> Path:
    path.mkdir()
    save_file({"w": torch.tensor(values)}, path / "model.safetensors")
    return path


def test_equal_figures_hold_and_one_bit_fails_where_bits_are_demanded() -> None:
    near = trained((1.0, 2.0 + 2**-51))
    assert norms_of(EXACTLY, trained(), trained()).outcome == "holds"
    assert norms_of(EXACTLY, trained(), near).outcome == "fails"
    found = norms_of(NEARLY, trained(), near)
    assert found.outcome == "holds" and found.bound == "0.0001"


def test_figures_beyond_the_bound_fail() -> None:
    assert norms_of(NEARLY, trained(), trained((1.0, 2.001))).outcome == "fails"
    assert norms_of(NEARLY, trained(), trained((1.0, 0.0))).outcome == "fails"


def test_losses_that_cancel_out_are_compared_absolutely() -> None:
    run, other = trained((1e-9, 0.0)), trained((2e-9, -1e-9))
    assert NEARLY.figures("loss", "loss", run, other, 1.0).outcome == "holds"
    assert norms_of(NEARLY, run, other).outcome == "fails"


@pytest.mark.parametrize("norms", [(1.0,), (1.0, None), ()])
def test_missing_iterations_and_figures_that_are_not_finite_fail_also_where_both_runs_have_them(
    norms: Sequence[float | None],
) -> None:
    assert norms_of(NEARLY, trained(norms), trained(norms)).outcome == "fails"


def test_gradients_that_are_zero_or_unused_prove_nothing() -> None:
    none, unused, some = trained((0.0, 0.0)), trained(learning_rate=0.0), trained((0.0, 1.0))
    assert "every gradient is 0" in str(why_no_gradient(none)) and why_no_step(none) == why_no_gradient(none)
    assert why_no_gradient(unused) is None and "learning rate is 0" in str(why_no_step(unused))
    assert why_no_gradient(some) is None and why_no_step(some) is None
    assert why_no_step(trained(())) is None
    assert compared("norms", why_no_gradient(none), lambda: holds("norms", "equal")).outcome == "not tested"


def test_a_reward_that_is_not_repeatable_is_no_fault_of_the_run(tmp_path: Path) -> None:
    run, other = (trained(model=save_model(tmp_path / name, 1.0), reward=0.25) for name in ("a", "b"))
    other = trained(model=other.model, samples=(("a", "b"), ("x", "y")))
    found = NEARLY.same_run("lost", "hit", run, other, is_repeatable=True)
    assert found.outcome == "not tested" and "the reward is not repeatable: group 0 of iteration 0" in found.shown
    later = trained(samples=(("a", "x"), ("x", "y")), reward=0.5)
    later.groups[2]["reward_mean"] = 0.1  # type: ignore[index]
    found = NEARLY.same_run("lost", "hit", later, trained(), is_repeatable=True)
    assert "other samples" in found.shown, "what follows other samples has other rewards"


def test_an_iteration_without_its_proof_is_not_proven() -> None:
    whole = trained()
    assert whole.is_proven(2)
    assert not Trained(whole.metrics, [], whole.groups, whole.model).is_proven(2)
    assert not Trained(whole.metrics, whole.ledger[:1], whole.groups, whole.model).is_proven(2)


def test_models_that_are_byte_for_byte_equal_hold_without_being_read(tmp_path: Path) -> None:
    run, other = (trained(model=save_model(tmp_path / name, 1.0, 2.0)) for name in ("a", "b"))
    assert EXACTLY.weights("weights", run, other).bound == "equal bit for bit"
    assert EXACTLY.weights("weights", run, trained()).outcome == "fails", "there is no other model"


@pytest.mark.distributed
def test_models_that_differ_are_measured_against_what_training_changed(
    tmp_path: Path,
) -> None:
    (save_model(tmp_path / "start", 0.0, 0.0) / "config.json").write_text("{}")
    run = trained(model=save_model(tmp_path / "a", 1.0, 1.0))
    near = trained(model=save_model(tmp_path / "b", 1.0, 1.001))
    comparison = Comparison(2, "float32", str(tmp_path / "start"), demands_bits=False)
    found = comparison.weights("weights", run, near)
    assert found.outcome == "holds" and "1 of 2 weights differ" in found.shown
    (tmp_path / "b" / "model.safetensors").unlink()
    save_file({"w": torch.tensor([1.0, 1.2])}, tmp_path / "b" / "model.safetensors")
    assert comparison.weights("weights", run, near).outcome == "fails"


def test_a_run_with_a_fault_has_to_be_proven_and_to_have_the_same_samples_and_weights(tmp_path: Path) -> None:
    run, other = (trained(model=save_model(tmp_path / name, 1.0)) for name in ("a", "b"))
    assert NEARLY.same_run("lost", "hit", run, other, is_repeatable=True).outcome == "holds"
    unproven = trained(on_policy=False)
    assert NEARLY.same_run("lost", "hit", unproven, other, is_repeatable=True).outcome == "fails"
    assert NEARLY.same_run("lost", "hit", trained((1.0,)), other, is_repeatable=False).outcome == "fails"
    others = trained(samples=(("a", "x"), ("y", "z")))
    found = NEARLY.same_run("lost", "hit", others, other, is_repeatable=False)
    assert found.outcome == "holds" and "not compared" in found.shown


def test_one_group_that_rounding_may_have_changed_is_no_verdict_and_many_are_a_fault() -> None:
    run = trained(samples=(("a", "b"), ("c", "d")))
    one = trained(samples=(("a", "b"), ("c", "x")))
    assert NEARLY.same_run("lost", "hit", one, run, is_repeatable=True).outcome == "not tested"
    both = trained(samples=(("a", "b"), ("x", "y")))
    assert NEARLY.same_run("lost", "hit", both, run, is_repeatable=True).outcome == "fails"


def test_broken_records_are_left_out_and_a_run_without_any_is_not_proven(tmp_path: Path) -> None:
    assert not Trained.read(tmp_path).is_proven(1)
    record: dict[str, Any] = {"iteration": 0, "grad_norm": 1.0, "on_policy": True}
    for name in ("metrics", "ledger"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n" + '{"iteration": 1, "gr')
    read = Trained.read(tmp_path)
    assert read.is_proven(1) and not read.is_proven(2)


def test_only_what_was_tested_counts_and_nothing_tested_is_no_success() -> None:
    assert not all_hold([])
    assert not all_hold([not_tested("a", "why")])
    assert all_hold([holds("a", ""), not_tested("b", "why")])
    assert not all_hold([holds("a", ""), fails("b", "why")])


def test_other_rollouts_of_a_program_are_no_fault_of_the_run() -> None:
    run, expected = trained(samples=(("x", "y"), ("c", "d"))), trained()
    found = NEARLY.same_run("lost", "hit", run, expected, is_repeatable=True, has_program=True)
    assert found.outcome == "not tested" and "a program" in found.shown
    assert NEARLY.same_run("lost", "hit", run, expected, is_repeatable=True).outcome == "fails"
    unproven = trained(samples=(("x", "y"), ("c", "d")), on_policy=False)
    assert NEARLY.same_run("lost", "hit", unproven, expected, is_repeatable=True, has_program=True).outcome == "fails"


def test_groups_are_compared_by_their_index_where_one_of_the_runs_left_another_one_out() -> None:
    samples = (tuple("abcdefghij"), ("k",))
    other = (("a", *"xcdefghij"), ("k",))
    run, expected = trained(samples=other), trained(samples=samples)
    fewer = Trained(run.metrics, run.ledger, run.groups[1:], run.model)
    found = NEARLY.same_run("lost", "hit", fewer, expected, is_repeatable=True)
    assert found.outcome == "not tested" and "1 of 9 groups of iteration 0 have other samples" in found.shown
