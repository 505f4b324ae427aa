"""Whole runs on the embedded engine of each family that the other tests of whole runs do not have."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.method.proof.gap_limits import noise_scale
from async_rl.shared.model_limits import FAMILIES
from tests.support.chat_tokenizer import make_chat_model
from tests.support.local_run import Run
from tests.support.rollout_program import use_program

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_every_update_is_on_policy_and_the_engine_has_the_trainers_log_probs(
    family: str, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = Run(tmp_path, tiny_model(family))
    run.train("--optimizer.learning_rate=1e-3")
    require_equal_log_probs(run)


def test_a_context_lengthened_by_yarn_is_trained(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_parameters": YARN}))
    run = Run(tmp_path, model)
    run.train("--optimizer.learning_rate=1e-3")
    require_equal_log_probs(run)


def test_ranks_that_share_rows_train_whole_runs(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Canaries at each publish, and groups in two stages."""
    run = Run(tmp_path, tiny_model("qwen3_moe"))
    layout = ("--trainer.context_parallel=2", "--trainer.expert_parallel=2", "--trainer.num_processes=2")
    run.train(*layout, "--trainer.micro_batch_tokens=20", "--publish.canary=always", "--optimizer.learning_rate=1e-3")
    require_equal_log_probs(run)


def test_turns_of_models_with_states_are_trained(tmp_path: Path) -> None:
    """Turns that go on, and that change what was said before; canaries at each publish; little room for states."""
    run = Run(tmp_path, make_chat_model(tmp_path / "chat", "qwen3_next"))
    use_program(run, tmp_path / "chat", tmp_path)
    run.train("--publish.canary=always", "--optimizer.learning_rate=1e-3", "--inference.max_concurrency=3")
    require_equal_log_probs(run)


def require_equal_log_probs(run: Run) -> None:
    proofs = run.lines("ledger.jsonl")
    assert len(proofs) == 3 and all(proof["on_policy"] for proof in proofs)
    assert all(proof["logprob_gaps"]["rms"] < 0.2 * noise_scale("float32") for proof in proofs)
