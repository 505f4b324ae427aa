"""An engine that draws otherwise than it reports, with the trainer's log-probs: no gap shows it, its draws do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from async_rl.errors import OnPolicyViolation
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits, noise_scale
from async_rl.method.types import Batch, Prompt, Publication
from tests.support.trainer.drawn_groups import drawn_groups
from trainer.trainer import MegatronTrainer

TEMPERATURE = 0.9
NUM_GROUPS, NUM_RESPONSES, NUM_TOKENS = 6, 16, 60
PUBLICATION = Publication(version="v1", fingerprint="f", instances=("http://a:1",), num_bytes=1, seconds=0.1)


@pytest.mark.parametrize(("factor", "kind"), [(1.0, None), (2.0, "a higher temperature"), (0.5, "a lower temperature")])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_is_proven_only_if_its_tokens_were_drawn_as_reported(
    factor: float,
    kind: str | None,
    steps: int,
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    tmp_path: Path,
) -> None:
    path = tiny_model("qwen3")
    torch.seed()
    groups = drawn_groups(path, NUM_GROUPS, NUM_RESPONSES, NUM_TOKENS, temperature=TEMPERATURE, factor=factor, end=1)
    old = {"old_policy": "model", "steps_per_batch": 2} if steps == 2 else {}
    trainer = make_trainer(path, temperature=TEMPERATURE, **old)
    trainer.before_publish()
    batch = Batch(0, {group.index: Prompt(group.prompt.prompt_id, group.prompt.token_ids, {}) for group in groups})
    limits = NoiseLimits(noise_scale("float32"))
    ledger = Ledger(tmp_path / "ledger.jsonl", NUM_RESPONSES, limits)
    rows = []
    for part in (groups,) if steps == 1 else (groups[::2], groups[1::2]):
        rows += [row for group in part for row in trainer.accumulate([[group]])]
        trainer.optimizer_step()
    assert max(gaps.largest for row in rows for _, gaps in row.gaps) < 1e-4
    # After a step the policy is not the one that sampled.
    judged = [row.index for row in rows if row.gaps[0][1].num_drawn]
    assert sorted(judged) == sorted(group.index for group in groups[::steps])
    if kind is None:
        ledger.require_on_policy(batch, PUBLICATION, rows)
        return
    with pytest.raises(OnPolicyViolation, match=f"http://a:1: its last [0-9]+ tokens are .* likelier at {kind}"):
        ledger.require_on_policy(batch, PUBLICATION, rows)
