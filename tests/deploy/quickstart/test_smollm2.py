"""`quickstart smollm2`: its data and reward, and its real model through warm start, run and evaluation, cut short."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoTokenizer

from async_rl.config.file import load_config
from async_rl.errors import ConfigError
from deploy.quickstart.__main__ import adapter_words
from deploy.quickstart.kind import KINDS
from deploy.quickstart.smollm2.reward import right_number
from deploy.quickstart.smollm2.warm_start import NUM_HELD_OUT, PACKAGE, examples, make_splits, require_known

KIND = KINDS["smollm2"]


def test_no_problem_is_in_two_sets_and_every_answer_is_right() -> None:
    splits = make_splits(seed=0)
    sets = [
        {row["problem"] for row in rows}
        for rows in (splits.held_out, splits.validation, splits.warm_start, splits.prompts)
    ]
    assert len(set().union(*sets)) == sum(map(len, sets)) and len(sets[0]) == NUM_HELD_OUT
    for row in splits.held_out:
        first, sign, second = row["problem"].split()
        assert int(row["answer"]) == int(first) + (1 if sign == "+" else -1) * int(second)
        assert row["prompt"].endswith(f": {row['problem']} =")
    assert make_splits(0) == splits and make_splits(1).held_out != splits.held_out


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("-28", "stop", 1.0),
        ("-29", "stop", 0.25),
        ("-24", "stop", 0.0625),
        # The right number, written otherwise.
        ("-028", "stop", 0.25),
        ("-28.", "stop", 0.0),
        ("-28 and so on", "stop", 0.0),
        ("-28", "length", 0.0),
        ("", "stop", 0.0),
        ("٣", "stop", 0.0),
        ("9" * 5000, "stop", 0.0),
    ],
)
def test_only_the_number_itself_is_right_and_near_ones_get_little(text: str, finish_reason: str, reward: float) -> None:
    response = SimpleNamespace(text=text, finish_reason=finish_reason)
    assert right_number(None, [response, response], {"answer": "-28"}) == [reward, reward]


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=rf"model\.gguf of {PACKAGE} has the SHA-256 \w+, expected \w+: it was"):
        require_known(tmp_path / "model.gguf")


@pytest.mark.nightly
@pytest.mark.distributed
def test_an_index_that_cannot_be_reached_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    env = {**os.environ, **nowhere, "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", KIND.warm_start, "--seed", "0", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 2, done.stderr
    assert f"{PACKAGE}, which has the model's weights, could not be fetched" in done.stderr
    assert list((tmp_path / "async-rl").iterdir()) == []


def run(command: Sequence[object]) -> str:
    done = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.packaging
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("adapters", [(), adapter_words("smollm2")], ids=["all weights", "adapters"])
def test_the_real_model_learns_for_five_iterations_that_are_all_proven(
    adapters: tuple[str, ...], tmp_path: Path
) -> None:
    run([KIND.warm_start, "--seed", 0, "--run-dir", tmp_path, "--max-steps", 2])
    base = tmp_path / "base_model"
    assert not hasattr(AutoConfig.from_pretrained(base), "quantization_config")
    steps = [json.loads(line)["step"] for line in (tmp_path / "warm_start.jsonl").read_text().splitlines()]
    assert steps == [2]

    words = [
        *(f"--run.dir={tmp_path / 'run'}", f"--model.path={base}", f"--reward.name={KIND.reward}"),
        f"--prompts.source={tmp_path / 'data' / 'prompts.jsonl'}",
        # An eighth of the batch.
        *("--prompts.prompts_per_batch=4", "--rollout.responses_per_prompt=4", "--train.iterations=5"),
        *adapters,
    ]
    system_prompt = str(load_config(KIND.config, words).prompts.system_prompt)
    run(["deploy.local.run", KIND.config, *words])
    proofs = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert [proof["on_policy"] for proof in proofs] == [True] * 5
    assert len({proof["fingerprint"] for proof in proofs}) == 5, "every step changed the weights"
    assert all(proof["num_responses"] == 16 for proof in proofs)

    # The warm start taught what the run renders.
    tokenizer = AutoTokenizer.from_pretrained(base)
    sampled = [json.loads(line)["prompt"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    taught = {tokenizer.decode(each.prompt_ids) for each in examples(tokenizer, make_splits(0).prompts, system_prompt)}
    assert sampled and taught.issuperset(sampled)

    said = run(
        [
            *("deploy.local.evaluate", tmp_path / "run" / "model", "--data", tmp_path / "data" / "held_out.jsonl"),
            *("--reward", KIND.reward, "--max-prompts", 16, "--max-tokens", 8, "--json"),
            *("--prompts.system_prompt", system_prompt),
        ]
    )
    (result,) = json.loads(said.splitlines()[-1])["sets"]
    assert result["num_prompts"] == 16 and 0 <= result["pass@1"] <= 1
    shutil.rmtree(tmp_path)
