"""The whole loop with vLLM as the inference pool: on-policy by proof, and by the log-probs themselves.

One batch has long prompts, more tokens at once than vLLM computes in a step, so that it cuts prompts in parts; another
has rollouts of several turns, whose later requests begin with what vLLM has in its prefix cache.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.method.proof.gap_limits import noise_scale
from async_rl.shared.model_families import TABLE
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.local_run import Run
from tests.support.tiny_model import make_tiny_model

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
    require_proofs(run)
    expected = {"num_groups": NUM_PROMPTS, "num_responses": NUM_PROMPTS * NUM_RESPONSES}
    assert all(proof == proof | expected for proof in run.lines("ledger.jsonl"))


def test_vllm_sleeps_while_the_trainer_trains(run: Run, vllm_python: str) -> None:
    """On a CPU its sleep only pauses; the calls, their order and the state of its scheduler are a device's."""
    snapshots = ("--publish.transport", "snapshot", "--publish.snapshot_dir", str(run.dir.parent / "snapshots"))
    run.start(
        *("--inference.engine", "vllm", "--inference.python", vllm_python, "--run.placement", "turns", *snapshots),
        *("--prompts.max_prompt_tokens", str(PROMPT_TOKENS), "--prompts.prompts_per_batch", str(NUM_PROMPTS)),
        *("--rollout.responses_per_prompt", str(NUM_RESPONSES)),
    )
    assert run.finish(FINISH_TIMEOUT_S) == 0, run.everything_said()
    require_proofs(run)
    groups = run.lines("timeline.jsonl")
    for iteration in range(3):
        own = [group for group in groups if group["iteration"] == iteration]
        assert max(group["finished_s"] for group in own) <= min(group["train_started_s"] for group in own)


@pytest.mark.nightly
def test_adapters_alone_go_to_two_of_which_one_is_killed_and_comes_back(run: Run, vllm_python: str) -> None:
    run.start(
        *("--inference.engine=vllm", f"--inference.python={vllm_python}", "--inference.num_instances=2"),
        *("--adapter.rank=4", "--adapter.publish=adapters", "--train.iterations=4", "--pool.timeout_s=600"),
        *("--prompts.max_prompt_tokens", str(PROMPT_TOKENS), "--prompts.prompts_per_batch", str(NUM_PROMPTS)),
        *("--rollout.responses_per_prompt", str(NUM_RESPONSES)),
    )
    run.wait_for_iterations(1, FINISH_TIMEOUT_S)
    run.hold()
    before = {member.boot_id for member in run.members()}
    run.instances()[0].kill()
    run.wait_until(lambda: len({each.boot_id for each in run.members()} - before) == 1, FINISH_TIMEOUT_S)
    run.tell("")
    assert run.finish(FINISH_TIMEOUT_S) == 0, run.everything_said()
    require_proofs(run, 4)
    assert sum(run.restarts().values()) == 1
    assert [record["num_instances"] for record in run.lines("metrics.jsonl")][::3] == [2, 2]
    whole = (run.dir / "model" / "model.safetensors").stat().st_size
    assert all(record["publish_bytes"] < whole / 2 for record in run.lines("metrics.jsonl")), whole


def test_vllm_maps_the_weights_of_a_trainer_on_its_own_devices(run: Run, vllm_python: str) -> None:
    run.start(
        *("--inference.engine", "vllm", "--inference.python", vllm_python),
        *("--run.placement", "shared", "--publish.transport", "ipc"),
        *("--prompts.max_prompt_tokens", str(PROMPT_TOKENS), "--prompts.prompts_per_batch", str(NUM_PROMPTS)),
        *("--rollout.responses_per_prompt", str(NUM_RESPONSES)),
    )
    assert run.finish(FINISH_TIMEOUT_S) == 0, run.everything_said()
    require_proofs(run)


DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts_per_tok": 4}
"""With all experts: bfloat16, the only dtype of its linear attention, rounds so that others may be chosen."""
FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "qwen2": {"hidden_size": 128},
    "llama": {"hidden_size": 128},
    "mistral": {},
    "smollm3": {"hidden_size": 128},
    "seed_oss": {},
    "qwen3_next": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "hidden_size": 64, **DELTA},
    "olmo2": {"hidden_size": 128},
    "olmo3": {"hidden_size": 128},
    "gemma3_text": {},
}
"""Beside qwen3, which the other tests have: of sizes that vLLM's kernels on CPU take."""

BY_STAGE = ("--trainer.pipeline_parallel=2", "--publish.transport=stages")
SETTINGS = {"llama": BY_STAGE, "qwen3_next": BY_STAGE}
"""Beside those of every family."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3_moe" else pytest.mark.nightly) for name in FAMILIES]
)
def test_every_publish_of_every_family_leaves_the_trainers_model_in_vllm(
    family: str, tmp_path: Path, vllm_python: str
) -> None:
    """Four iterations: vLLM loads new weights several times over the same model."""
    dtype = "bfloat16" if TABLE[family].delta else "float32"
    run = Run(tmp_path, make_tiny_model(tmp_path / "model", family, head_dim=32, **FAMILIES[family]))
    rows = [f"{i} and {7 * i}" for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    run.start(
        *("--inference.engine", "vllm", "--inference.python", vllm_python, "--train.iterations", "4"),
        *("--prompts.prompts_per_batch", "4", "--rollout.responses_per_prompt", "4"),
        *("--rollout.max_response_tokens", "32", "--optimizer.learning_rate", "1e-3", "--model.dtype", dtype),
        *SETTINGS.get(family, ()),
    )
    assert run.finish(FINISH_TIMEOUT_S) == 0, run.everything_said()
    proofs = run.lines("ledger.jsonl")
    assert len(proofs) == 4 and all(proof["on_policy"] for proof in proofs)
    share = 0.2 if dtype == "float32" else 0.6
    assert all(proof["logprob_gaps"]["rms"] < share * noise_scale(dtype) for proof in proofs)


PROGRAM = '''
async def rollout(prompt, policy):
    """One to three turns with a tool's answers between them; half of the rollouts then change their first message."""
    messages = [{"role": "user", "content": prompt.row["prompt"]}]
    num_vowels = 0
    for number in range(1 + prompt.seed % 3):
        turn = await policy.generate(messages, max_tokens=12)
        num_vowels += sum(letter in "aeiou" for letter in turn.text)
        messages += [turn.message, {"role": "tool", "content": f"result {number}", "tool_call_id": f"call {number}"}]
    if prompt.seed % 2:
        await policy.generate([{"role": "user", "content": "another question"}, *messages[1:]], max_tokens=8)
    return num_vowels / 10
'''


@pytest.mark.nightly
def test_rollouts_of_several_turns_are_on_policy_with_vllm(run: Run, vllm_python: str) -> None:
    model, program = run.dir.parent / "chat", run.dir.parent / "program.py"
    make_tiny_model(model, "qwen3", tied=True, vocab_size=128, head_dim=32, max_position_embeddings=1024)
    make_chat_tokenizer(model)
    program.write_text(PROGRAM)
    run.start(
        *(
            "--model.path",
            str(model),
            "--rollout.program",
            f"python:{program}:rollout",
            "--rollout.options.renderer",
            "qwen3",
        ),
        *("--inference.engine", "vllm", "--inference.python", vllm_python),
        *("--prompts.max_prompt_tokens", "700", "--prompts.prompts_per_batch", str(NUM_PROMPTS)),
        *("--prompts.chat_template", "true", "--rollout.responses_per_prompt", str(NUM_RESPONSES)),
        *("--rollout.max_response_tokens", "64"),
    )
    assert run.finish(FINISH_TIMEOUT_S) == 0, run.everything_said()
    require_proofs(run)
    assert all(proof["num_groups"] == NUM_PROMPTS for proof in run.lines("ledger.jsonl"))
    for rollouts in run.lines("rollouts.jsonl"):
        assert rollouts["num_rollouts"] == NUM_PROMPTS * NUM_RESPONSES
        assert rollouts["turns_max"] == 4 and rollouts["branches_mean"]


def require_proofs(run: Run, num_iterations: int = 3) -> None:
    """Each iteration of other weights, and log-probs that are the trainer's."""
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(num_iterations))
    assert all(proof["on_policy"] for proof in proofs)
    assert len({proof["weight_version"] for proof in proofs}) == num_iterations
    assert len({proof["fingerprint"] for proof in proofs}) == num_iterations, "every step changes the weights"
    assert all(record["max_logprob_gap"] <= 1e-3 for record in run.lines("metrics.jsonl"))
    # Twenty times what was seen, and far below the scale that such noise is allowed.
    gaps = [proof["logprob_gaps"] for proof in proofs]
    assert all(gap["rms"] <= noise_scale("float32") / 10 for gap in gaps), gaps
    # Of several instances one may have too few tokens.
    assert all(gap["unjudged"] is None for gap in gaps if len(gap["instances"]) == 1), gaps
