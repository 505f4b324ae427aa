"""Rewards of several parts, in real worker processes: weights, choice by row, faults, and what counts as correct."""

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.errors import ConfigError, RewardError
from async_rl.method.types import Prompt, Scores
from async_rl.rollouts.rewards import Reward
from async_rl.shared.event_loop import EventLoopThread
from tests.support.groups import text_responses
from tests.support.json_service import JsonService, running

pytestmark = pytest.mark.distributed

FLAKY = """
import os, pathlib, time

def flaky(prompt, responses, row):
    log = pathlib.Path(row["log"])
    with log.open("a") as file: file.write("x")
    if log.stat().st_size < row.get("good_from", 1): raise KeyError("not yet")
    return [len(response.text) / 10 for response in responses]

def huge(prompt, responses, row):
    return [1e30 for _ in responses]

def hangs(prompt, responses, row):
    time.sleep(3600)
"""


def lengths(body: Any) -> Any:
    return {"rewards": [len(each["text"]) for each in body["responses"]]}


def test_the_total_is_the_weighted_sum_of_the_parts_a_row_names(
    started: Callable[..., Reward], loop: EventLoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronous part, an asynchronous one over TLS with a token, and a user's that fails at first."""
    (tmp_path / "mine.py").write_text(FLAKY)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("RM_TOKEN", "xyz")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    with running(JsonService(lengths, [500]), tls) as service:
        reward = started(
            column="reward",
            timeout_s=20,
            parts=[
                {"name": "regex", "options": {"pattern": "x.*"}, "weight": -0.5, "label": "format"},
                {"name": "exact"},
                {
                    "name": "http",
                    "options": {"url": service.url, "token_from": "env:RM_TOKEN"},
                    "weight": 2,
                    "label": "model",
                },
                {"name": f"python:{tmp_path}/mine.py:flaky", "label": "mine", "max_attempts": 3},
            ],
        )
        row: dict[str, Any] = {"answer": "xy", "log": str(tmp_path / "log"), "good_from": 2}

        def score(named: Any) -> Scores:
            return loop.run(reward.score(Prompt("row7", (3,), row | {"reward": named}), text_responses(*texts)))

        texts = ("xy", "abc")
        exact, formed, model, mine = (1.0, 0.0), (1.0, 0.0), (2.0, 3.0), (0.2, 0.3)
        assert score("exact") == Scores((1.0, 0.0), (("exact", exact),))
        # In the order of the config.
        everything = score(["mine", "model", "exact", "format"])
        assert everything.rewards == pytest.approx((-0.5 + 1 + 4 + 0.2, 6 + 0.3))
        assert everything.parts == (("format", formed), ("exact", exact), ("model", model), ("mine", mine))
        assert len(service.bodies) == 2 and service.headers[1]["Authorization"] == "Bearer xyz"
        assert (tmp_path / "log").read_text() == "xx", "only the part that failed is made again"
        assert reward.correct_at == {"exact": 1.0}
        for named in ("math", [], None, ["exact", "math"], 3):
            with pytest.raises(RewardError, match=r"prompt row7: its row's 'reward' \(reward.column\) is .*: expected"):
                score(named)


def test_metrics_of_parts_have_their_labels(
    started: Callable[..., Reward], loop: EventLoopThread, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(prompt, responses, row): return [{'score': 0.5, 'length': len(r.text)} for r in responses]"
    )
    mine = {"name": f"python:{tmp_path / 'mine.py'}:score", "label": "mine"}
    reward = started(parts=[mine, {"name": "regex", "options": {"pattern": "x.*"}}])
    scores = loop.run(reward.score(Prompt("0", (1,), {}), text_responses("x", "yy")))
    assert scores.rewards == (1.5, 0.5) and [label for label, _ in scores.parts] == ["mine", "regex"]
    assert scores.metrics == (("mine/length", (1.0, 2.0)),)


def test_a_part_that_fails_ends_the_call_and_is_named(
    started: Callable[..., Reward], loop: EventLoopThread, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FLAKY)
    mine = [{"name": f"python:{tmp_path}/mine.py:{name}", "label": name} for name in ("flaky", "hangs", "huge")]
    reward = started(parts=[*mine[:2], {"name": "exact"}])
    prompt = Prompt("row7", (3,), {"answer": "a", "log": str(tmp_path / "log"), "good_from": 9})
    with pytest.raises(RewardError, match=r"(?s)reward 'flaky \(python:.*:flaky\)', prompt row7 failed:.*not yet"):
        loop.run(reward.score(prompt, text_responses("a")))
    with pytest.raises(RewardError, match=r"prompt row7: the sum of the parts of its reward: it returned 2e\+30"):
        loop.run(started(parts=[{**mine[2], "weight": 2.0}]).score(prompt, text_responses("a")))


def test_a_part_that_cannot_be_loaded_is_named_and_leaves_no_process(
    started: Callable[..., Reward], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(0.3)\nraise KeyError('broken')")
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match=r"(?s)reward 'bad \(python:.*' cannot be loaded:.*broken"):
        started(parts=[{"name": "exact"}, {"name": f"python:{tmp_path}/mine.py:score", "label": "bad"}])
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=60)
    assert not alive


def test_calls_of_a_judge_are_limited_by_their_requests(started: Callable[..., Reward], loop: EventLoopThread) -> None:
    """Eight groups of 4 with 6 requests at once: one group at a time, each within its own time, of 4 s together."""
    said = {"choices": [{"message": {"content": "1"}}]}
    with running(JsonService(lambda body: said, delay_s=0.5)) as service:
        options = {"url": service.url, "model": "m", "rubric": "{response}"}
        reward = started(name="judge", options=options, max_concurrency=6, timeout_s=3.9)
        calls = [loop.submit(reward.score(Prompt(f"row{i}", (3,), {}), text_responses("a") * 4)) for i in range(8)]
        assert [call.result(30).rewards for call in calls] == [(1.0,) * 4] * 8
        assert service.most_at_once == 4
