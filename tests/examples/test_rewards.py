"""The examples' rewards score a row, and tell a good response from a bad one."""

import asyncio
import json
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt
from async_rl.rollouts.data.part import parts_of
from async_rl.rollouts.data.prompts import first_rows
from async_rl.rollouts.rewards.base import as_rewards
from async_rl.rollouts.rewards.function import RewardTraits, load_function
from async_rl.rollouts.rewards.row_parts import labels_of
from tests.support import ROOT
from tests.support.groups import text_responses

EXAMPLES = ROOT / "examples"


def score(name: str, row: dict[str, Any], *texts: str) -> list[float]:
    """What the reward called `name` gives for responses with these texts, as a worker would ask for it."""
    return score_by(RewardSection(name=name), row, *texts)


def score_by(config: RewardSection, row: dict[str, Any], *texts: str) -> list[float]:
    function = load_function(config)
    returned = function(Prompt("row0", (3, 4), row), text_responses(*texts), row)
    return as_rewards(asyncio.run(returned) if RewardTraits.of(function).is_async else returned, len(texts))


def rows_of(example: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / example / "rows.jsonl").read_text().splitlines()]


def test_first_run_pays_half_for_an_answer_among_other_words() -> None:
    name = f"python:{EXAMPLES}/first_run/reward.py:exact"
    assert score(name, rows_of("first_run")[0], "5", " 5\n", "it is 5", "6") == [1.0, 1.0, 0.5, 0.0]
    assert RewardTraits.of(load_function(RewardSection(name=name))).correct_at == 1.0


def test_exact_pays_for_the_answer_alone() -> None:
    name = f"python:{EXAMPLES}/rewards/exact.py:exact"
    assert score(name, {"prompt": "What is 2 + 3?", "answer": "5"}, "5", "it is 5") == [1.0, 0.0]
    assert RewardTraits.of(load_function(RewardSection(name=name))).correct_at == 1.0


@pytest.mark.parametrize("row", range(4))
def test_math_knows_the_right_answer_of_every_row(row: int) -> None:
    solution = rows_of("math")[row]
    right = solution["answer"].rpartition("#### ")[2]
    assert score("math", solution, f"so \\boxed{{{right}}}", "so \\boxed{77}") == [1.0, 0.0]


def test_the_reasoning_gym_task_scores_its_own_rows() -> None:
    prompts = PromptsSection(source="reasoning-gym:chain_sum", prompts_per_batch=1)
    (row,) = first_rows(parts_of(prompts)[0], 1)
    assert score("reasoning_gym", dict(row), str(row["answer"]), "no idea")[0] == 1.0


class Judge(BaseHTTPRequestHandler):
    """Answers as an OpenAI-compatible server does: "1" to whoever speaks of five, nonsense to whoever asks for it."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        content = "perhaps" if "nonsense" in asked else "1" if "five" in asked else "0.25"
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[str]:
    """The name of the judge example, which asks a server of this test."""
    server = HTTPServer(("127.0.0.1", 0), Judge)
    thread = Thread(target=server.serve_forever)
    thread.start()
    source = (EXAMPLES / "rewards" / "judge.py").read_text()
    assert "http://127.0.0.1:9000" in source
    (tmp_path / "judge.py").write_text(source.replace(":9000", f":{server.server_port}"))
    yield f"python:{tmp_path}/judge.py:judge"
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_row_of_the_example_chooses_its_parts_and_gets_their_rewards(
    judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES / "rewards")
    tree = tomllib.loads(Path("run.toml").read_text())["reward"]
    port = (tmp_path / "judge.py").read_text().partition("127.0.0.1:")[2].partition("/")[0]
    tree["parts"][2]["options"]["url"] = f"http://127.0.0.1:{port}/v1"
    parts = RewardSection.model_validate(tree)
    chosen = [labels_of(parts, row) for row in rows_of("rewards")]
    assert chosen == [["math", "format"]] * 2 + [["judge"]] * 2
    problem, _, _, letter = rows_of("rewards")
    text = "<think>6 x 4</think> \\boxed{24}"
    assert score_by(parts.single_rewards["math"], problem, text) == [1.0]
    assert score_by(parts.single_rewards["format"], problem, text, "24") == [1.0, 0.0]
    # The judge of this test says 1 of 10 to whoever speaks of five.
    assert score_by(parts.single_rewards["judge"], letter, "Dear neighbour, after five, please") == [0.1]


def test_the_judge_is_asked_about_every_response(judge: str) -> None:
    assert score(judge, {"prompt": "What is 2 + 3?"}, "five", "{6}") == [1.0, 0.25]


def test_a_judge_that_says_no_number_is_an_error_to_try_again(judge: str) -> None:
    with pytest.raises(ValueError, match="perhaps"):
        score(judge, {"prompt": "What is 2 + 3?"}, "five", "nonsense")
