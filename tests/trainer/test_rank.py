"""All ranks take part in a publish: in every try to stream, in scoring, and in what comes out of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.trainer import replica_worker
from tests.support.trainer.replica_worker import PROMPT, RESPONSES
from trainer.trainer import MegatronTrainer


@pytest.mark.distributed
def test_ranks_follow_the_main_rank_through_broken_streams_and_scoring(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer], tmp_path: Path
) -> None:
    checkpoint = tiny_model("qwen3", tied=True)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    subprocess.run(
        [*command, "-m", replica_worker.__name__, checkpoint, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
        timeout=120,
        check=True,
    )
    main, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    urls = ["http://a", "http://b"]
    assert main["publications"] == other["publications"]
    assert [(p["version"], p["instances"]) for p in main["publications"]] == [("run-0", urls), ("run-1", urls)]
    expected = make_trainer(checkpoint).score(PROMPT, RESPONSES)
    for scores, expected_scores in zip(main["scores"], expected, strict=True):
        assert scores == pytest.approx(expected_scores, abs=1e-5)
