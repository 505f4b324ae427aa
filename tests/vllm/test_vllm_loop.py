"""The whole loop with vLLM as the inference pool: on-policy by proof, and by the log-probs themselves.

The batch has long prompts, more tokens at once than vLLM computes in a step, so that it cuts prompts in parts.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.proof.gap_limits import noise_scale
from tests.support.local_run import Run

pytestmark = [pytest.mark.vllm, pytest.mark.distributed, pytest.mark.timeout(900)]

FINISH_TIMEOUT_S = 800
"""vLLM and the trainer take half a minute to start on a quiet machine; more than six were seen on a busy one."""

NUM_PROMPTS = 4
NUM_RESPONSES = 8
PROMPT_TOKENS = 512


@pytest.fixture
def run(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Run]:
    """On a model that takes long prompts; vLLM's attention on CPU has no heads smaller than 32."""
    model = tiny_model("qwen3", tied=True, head_dim=32, max_position_embeddings=1024)
    run = Run(tmp_path, model)
    draw = random.Random(0)
    # One token a character; no two prompts begin alike, so that the prefix cache spares nothing but a group's own.
    rows = ["".join(draw.choices("abcdefghij ", k=PROMPT_TOKENS)) for _ in range(3 * NUM_PROMPTS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.terminate()
        run.process.wait(30)


def test_a_run_with_vllm_is_on_policy_and_its_log_probs_are_the_trainers(run: Run, vllm_python: str) -> None:
    run.start(
        *("--inference.engine", "vllm", "--inference.python", vllm_python),
        *("--prompts.max_prompt_tokens", str(PROMPT_TOKENS), "--prompts.prompts_per_batch", str(NUM_PROMPTS)),
        *("--rollout.responses_per_prompt", str(NUM_RESPONSES)),
    )
    assert run.finish(FINISH_TIMEOUT_S) == 0, run.everything_said()
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [0, 1, 2]
    expected = {"on_policy": True, "num_groups": NUM_PROMPTS, "num_responses": NUM_PROMPTS * NUM_RESPONSES}
    assert all(proof == proof | expected for proof in proofs)
    assert len({proof["weight_version"] for proof in proofs}) == 3
    assert len({proof["fingerprint"] for proof in proofs}) == 3, "every step changes the weights"
    assert all(record["max_logprob_gap"] <= 1e-3 for record in run.lines("metrics.jsonl"))
    # Twenty times what was seen, and far below the scale that such noise is allowed.
    gaps = [proof["logprob_gaps"] for proof in proofs]
    assert all(gap["unjudged"] is None and gap["rms"] <= noise_scale("float32") / 10 for gap in gaps), gaps
