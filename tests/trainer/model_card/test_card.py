"""The model card of an exported checkpoint, from whole, partial and hostile records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from trainer.model_card.card import Exported, model_card

HUB = "Qwen/Qwen3-0.6B"


def make_config(**sections: Any) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "/home/someone/runs/mine", "seed": 7},
        "model": {"path": HUB, "dtype": "bfloat16"},
        "prompts": {"source": "hf:openai/gsm8k:main:train", "prompts_per_batch": 16},
        "rollout": {"responses_per_prompt": 4},
        "reward": {"name": "math"},
        "train": {"iterations": 40},
    }
    return parse_config({name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}}, "test")


def card(
    run_dir: Path,
    config: Config,
    name: str = "mine",
    iteration: int = 40,
    *,
    base: str | None = None,
    on_hub: bool = True,
    is_adapter: bool = False,
) -> str:
    exported = Exported(name, config, iteration, iteration, base or config.model.path, on_hub, is_adapter)
    return model_card(exported, run_dir)


def front_matter(text: str) -> dict[str, Any]:
    _, head, _ = text.split("---\n", 2)
    parsed = yaml.safe_load(head)
    assert isinstance(parsed, dict)
    return parsed


def write_records(run_dir: Path, iterations: int = 50) -> None:
    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        (run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    numbers = range(iterations)
    lines("metrics.jsonl", [{"iteration": i, "reward_mean": i / 100, "grad_norm": None} for i in numbers])
    proof: dict[str, Any] = {"on_policy": True, "num_responses": 64, "num_response_tokens": 1000}
    lines("ledger.jsonl", [{"iteration": i, **proof, "max_logprob_gap": i / 1000} for i in numbers])
    evaluation: dict[str, Any] = {
        "set": "aime",
        "complete": True,
        "num_prompts": 30,
        "num_samples": 8,
        "temperature": 0.7,
    }
    rows = [
        {"iteration": i, **evaluation, "avg@8": 0.1 + i / 100, "intervals": {"avg@8": [0.05, 0.2 + i / 100]}}
        for i in (0, 20, 40, 49)
    ]
    lines("evaluations.jsonl", [*rows, {"iteration": 40, **evaluation, "set": "half", "complete": False}])


def test_the_front_matter_names_base_model_and_data_of_the_hub(tmp_path: Path) -> None:
    assert front_matter(card(tmp_path, make_config())) == {
        "base_model": HUB,
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["async-rl", "reinforcement-learning"],
    }


def test_a_directory_is_not_taken_for_a_name_of_the_hub(tmp_path: Path) -> None:
    config = make_config(model={"path": "models/base"}, prompts={"source": "/home/someone/data/rows.jsonl"})
    text = card(tmp_path, config, on_hub=False)
    assert front_matter(text).keys() == {"library_name", "pipeline_tag", "tags"}
    assert "| data | `.../rows.jsonl` |" in text and "someone" not in text


def test_adapters_are_said_to_be_adapters_of_their_base(tmp_path: Path) -> None:
    write_records(tmp_path)
    adapter = {"rank": 16, "targets": ["q_proj", "v_proj"], "path": "/home/someone/before"}
    text = card(tmp_path, make_config(adapter=adapter), is_adapter=True)
    assert front_matter(text) == {
        "base_model": HUB,
        "datasets": ["openai/gsm8k"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["async-rl", "reinforcement-learning", "lora", f"base_model:adapter:{HUB}"],
    }
    assert "Adapters (LoRA) of a run of async-rl after 40 iterations" in text and f"trained beside `{HUB}`" in text
    assert "| adapters | rank 16, alpha 32, of `q_proj`, `v_proj` |" in text and "--max-lora-rank 16`" in text
    assert 'adapter.targets = ["q_proj", "v_proj"]' in text and 'adapter.path = ".../before"' in text
    merged = card(tmp_path, make_config(adapter={"rank": 16}))
    assert "| adapters | rank 16, alpha 32, of `all-linear`, merged into the weights |" in merged
    assert front_matter(merged)["library_name"] == "transformers" and "lora" not in front_matter(merged)["tags"]


def test_a_base_that_was_named_for_the_export_is_the_one_that_is_named(tmp_path: Path) -> None:
    """`--model`, where the run's own name of it is of no use."""
    config = make_config(model={"path": "models/base"}, adapter={"rank": 4})
    text = card(tmp_path, config, base="Qwen/Qwen3-1.7B", is_adapter=True)
    assert front_matter(text)["base_model"] == "Qwen/Qwen3-1.7B" and "| base model | `Qwen/Qwen3-1.7B` |" in text
    local = card(tmp_path, config, base="/home/someone/base", on_hub=False, is_adapter=True)
    assert "base_model" not in front_matter(local) and "trained beside `.../base`" in local
    assert front_matter(local)["tags"] == ["async-rl", "reinforcement-learning", "lora"]


def test_a_program_that_rewards_itself_is_said_so(tmp_path: Path) -> None:
    config = make_config(rollout={"program": "command:/opt/agents/agent --api-key abc"}, reward={"name": None})
    text = card(tmp_path, config)
    assert "| rollouts | `command:.../agent --api-key ***` |" in text and "| reward | the program's own |" in text


def test_several_rewards_are_all_named(tmp_path: Path) -> None:
    parts = [{"name": "math"}, {"name": "python:/home/someone/style.py:score", "weight": 0.1}]
    text = card(tmp_path, make_config(reward={"name": None, "parts": parts}))
    assert "| reward | `math`, `python:.../style.py:score` |" in text


def test_curves_evaluations_and_proof_are_those_of_the_exported_iterations(tmp_path: Path) -> None:
    write_records(tmp_path)
    text = card(tmp_path, make_config())
    # Ten ranges of four iterations; the last is 36 to 39 with the rewards 0.36 to 0.39. No record has a gradient norm.
    assert (
        "| iterations | reward |" in text
        and "| 36–39 | 0.375 |" in text
        and "| 40" not in text.partition("evaluated")[0]
    )
    assert "The exported weights were evaluated: the rows after 40 iterations." in text
    assert re.findall(r"\| `aime` \| (\d+) \|", text) == ["0", "40"] and "`half`" not in text
    assert "| avg@8 0.5 [0.05, 0.6] |" in text
    assert "| proven on-policy and complete | 40 |" in text and "| sampled tokens | 40,000 |" in text
    assert "in nats | 0.039 |" in text and "| without a line in the ledger | 0 |" in text


def test_an_evaluation_of_earlier_weights_is_not_claimed_for_these(tmp_path: Path) -> None:
    write_records(tmp_path)
    text = card(tmp_path, make_config(), iteration=45)
    assert "The exported weights were not evaluated; the last evaluation is of those after 40 iterations." in text


def test_without_records_nothing_is_claimed(tmp_path: Path) -> None:
    text = card(tmp_path / "none", make_config())
    assert "no readable `metrics.jsonl`" in text and "no complete evaluation" in text
    assert "no readable `ledger.jsonl` of these iterations, so nothing is claimed" in text
    assert "proven" not in text and "licence" in text


def test_gaps_in_the_ledger_and_failed_proofs_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"iteration": i, "on_policy": i != 3, "num_response_tokens": 10} for i in (0, 1, 3, 5)
    ]
    rows += [{"iteration": 1, "on_policy": True, "num_response_tokens": 10, "logprob_gaps": {"unjudged": "few"}}]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = card(tmp_path, make_config(), iteration=6)
    assert "| proven on-policy and complete | 3 |" in text and "| failed | 1 |" in text
    assert "| without a line in the ledger | 2 |" in text and "| sampled tokens | 40 |" in text
    assert "in nats | – |" in text and "judge these differences | 1 |" in text


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "null", '{"iteration": "1"}', '{"iteration": true}', '{"x": 1}', "\x00\udcff", "[" * 10**5],
)
def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path: Path, line: str) -> None:
    good = json.dumps({"iteration": 0, "reward_mean": 0.5})
    text = f"{good}\n{line}\n{{'half of a line"
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    shown = card(tmp_path, make_config())
    assert "| 0 | 0.5 |" in shown and "left out: 1 of `metrics.jsonl`." in shown


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"0.5"', "true", "[]", "1" + "0" * 400])
def test_what_is_no_number_is_no_figure(tmp_path: Path, value: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 0, "reward_mean": {value}, "grad_norm": 2}}\n')
    lines = [
        {"iteration": 0, "complete": True, "set": None, "num_samples": [], "intervals": {"reward_mean": [1]}},
        {"iteration": 1, "complete": True, "set": {"a": 1}, "intervals": [], "reward_mean": json.loads(value)},
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "ledger.jsonl").write_text(f'{{"iteration": 0, "on_policy": 1, "max_logprob_gap": {value}}}\n')
    text = card(tmp_path, make_config())
    assert "| iterations | gradient norm |" in text and "| 0 | 2 |" in text
    assert "| failed | 1 |" in text and "| – | – |" in text


HOSTILE = [
    "---\nbase_model: evil/x\n---",
    "a|b `c` ``d`` # <script>alert(1)</script>",
    "![x](http://y) [z]: http://z *b* _i_",
    "x: {y: [1, '\"",
    "```\nend",
    "名前 \u202e ü",
    "\x7f\x01\x1b[31m",
]


def shown_name(name: str) -> str:
    """On one line, without what no reader could see."""
    return "".join(sign if sign.isprintable() else " " for sign in name)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_with_signs_of_markdown_and_yaml_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    config = make_config(
        model={"path": name},
        prompts={"source": name, "system_prompt": name, "columns": {"answer": name}},
        reward={"name": name},
    )
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"iteration": 0, "complete": True, "set": name}) + "\n")
    text = card(tmp_path, config, name=name)
    assert front_matter(text).keys() == {"library_name", "pipeline_tag", "tags"}
    tokens = MarkdownIt("commonmark").enable("table").parse(text.split("---\n", 2)[2])
    inner = [each for token in tokens for each in (token, *(token.children or ()))]
    assert not {each.type for each in inner} & {"html_block", "html_inline", "link_open", "image", "em_open"}
    assert sum(each.type == "heading_open" for each in inner) == 8, "the title and its seven sections"
    assert {each.info for each in inner if each.type == "fence"} == {"python", "toml"}
    visible = " ".join(shown_name(name).split())
    title = next(token for token in tokens if token.type == "inline")
    assert "".join(each.content for each in title.children or ()) == visible
    codes = [each.content for each in inner if each.type == "code_inline"]
    assert codes.count(visible) >= 3, "base model, data, and the set"
    cells = [each.type for each in inner]
    assert (cells.count("tr_open"), cells.count("th_open")) == (10 + 2, 2 + 8), "training, evaluation"
    assert not any(sign in text for sign in "\x01\x1b\x7f\u202e")
