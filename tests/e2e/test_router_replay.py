"""Whole runs of a model with experts in bfloat16, along the engine's routes and along the trainer's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_tokenizer import make_chat_model
from tests.support.local_run import Run
from tests.support.rollout_program import use_program

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}
"""So many choices that some are near a tie, where rounding decides."""

SETTINGS = ("--model.dtype=bfloat16", "--train.iterations=2", "--optimizer.learning_rate=1e-4", "--run.seed=7")


def gaps(path: Path, model: Path, *words: str, has_turns: bool = False) -> list[dict[str, Any]]:
    """The statistics of trainer's less rollout's log-probs, of each iteration."""
    path.mkdir()
    run = Run(path, model)
    if has_turns:
        use_program(run, model, path)
    run.train(*SETTINGS, *words)
    proofs = run.lines("ledger.jsonl")
    assert len(proofs) == 2 and all(proof["on_policy"] for proof in proofs)
    assert all(proof["num_response_tokens"] > 300 for proof in proofs)
    return [proof["logprob_gaps"] for proof in proofs]


def test_log_probs_are_closer_to_the_engines_along_its_routes(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3_moe", **SIZES)
    own = gaps(tmp_path / "own", model)
    replayed = gaps(tmp_path / "replayed", model, "--train.router_replay=true", "--trainer.recompute=full")
    split = gaps(tmp_path / "split", model, "--train.router_replay=true", "--trainer.micro_batch_tokens=60")
    for name, found in {"own routes": own, "replayed": replayed, "replayed, in two stages": split}.items():
        print(name, found)
    worst = max(each["rms"] for each in (*replayed, *split))
    assert worst < 0.5 * min(each["rms"] for each in own)


def test_turns_and_branches_have_the_routes_of_their_last_turn(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "chat", "qwen3_moe", **SIZES)
    own = gaps(tmp_path / "own", model, has_turns=True)
    replayed = gaps(tmp_path / "replayed", model, "--train.router_replay=true", has_turns=True)
    for name, found in {"own routes": own, "replayed": replayed}.items():
        print(name, found)
    assert max(each["rms"] for each in replayed) < 0.5 * min(each["rms"] for each in own)
