"""A run with the nodes of examples/pipeline: a reward model as a service, a filter, weights of tokens, a teacher."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from async_rl.config.keys import as_toml
from tests.support import ROOT
from tests.support.json_service import JsonService, running
from tests.support.local_run import Run
from tests.support.same_run import assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(600)]

FOLDER = ROOT / "examples" / "pipeline"
SETTINGS = (
    *("--train.iterations=3", "--train.order=prompt", "--checkpoint.every=1", "--reward.timeout_s=30"),
    "--algorithm.kl_coef=0.05",
)


def nodes_of_the_example(*left_out: str) -> str:
    nodes = tomllib.loads((FOLDER / "run.toml").read_text())["pipeline"]["nodes"]
    nodes = [node for node in nodes if node["name"] not in left_out]
    for node in nodes:
        node["function"] = node["function"].replace("nodes.py", f"{FOLDER}/nodes.py")
    return f"--pipeline.nodes={as_toml(nodes)}"


def test_what_nodes_write_is_trained_recorded_and_the_same_after_a_kill(
    new_run: Callable[..., Run],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    reproducible_products: None,
) -> None:
    monkeypatch.setenv("TEACHER", str(tiny_model("qwen3", seed=7)))
    with running(JsonService(lambda body: [len(text) / 100 for text in body["responses"]])) as service:
        monkeypatch.setenv("STYLE_URL", service.url)
        plain = new_run("plain").train(*SETTINGS)
        taught = new_run("taught").train(*SETTINGS, nodes_of_the_example())
        # The teacher's log-probs are those of transformers, which rounds them in more than one way.
        nodes = nodes_of_the_example("taught")
        whole = new_run("whole").train(*SETTINGS, nodes)
        run = new_run("killed")
        run.start(*SETTINGS, nodes)
        run.wait_for_iterations(1)
        run.kill_trainer()
        assert run.finish() == 0, run.everything_said()
    assert_same_run(run, whole)
    records = [r.lines("metrics.jsonl") for r in (whole, plain, taught)]
    assert records[2][0]["grad_norm"] != records[0][0]["grad_norm"] and records[2][0]["loss"] != records[0][0]["loss"]
    for record, of_plain, _ in zip(*records, strict=True):
        figures = {name: record[f"reward/{name}"] for name in ("style", "mixed", "unshaped", "unsolved")}
        assert record["reward_mean"] == pytest.approx(figures["mixed"])
        assert figures["mixed"] == pytest.approx(figures["unshaped"] + 0.2 * figures["style"])
        assert figures["unsolved"] == 1.0 and record["grad_norm"] != of_plain["grad_norm"]
    assert fmean(len(body["responses"]) for body in service.bodies) == 4
    assert all(row["on_policy"] for row in whole.lines("ledger.jsonl"))


def test_a_node_that_hangs_ends_the_run_by_name_and_a_changed_one_is_refused_at_resume(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    file = tmp_path / "nodes.py"
    file.write_text("import time\ndef hangs(rewards): time.sleep(3600)\ndef fine(rewards): return rewards\n")
    node = {"name": "n", "function": f"python:{file}:fine", "reads": ["rewards"], "timeout_s": 1.0}
    run = new_run("hangs")
    run.train(*SETTINGS, f"--pipeline.nodes={as_toml([node])}")
    more = ("--train.iterations=4", "--run.resume=true")
    run.start(*SETTINGS, *more, f"--pipeline.nodes={as_toml([{**node, 'writes': 'shaped_rewards'}])}")
    assert run.finish() == 2 and "pipeline.nodes" in run.everything_said()
    file.write_text(file.read_text() + "# other\n")
    run.start(*SETTINGS, *more, f"--pipeline.nodes={as_toml([node])}")
    assert run.finish() != 0 and "the reward is" in run.everything_said()
    other = new_run("other")
    other.start(*SETTINGS, f"--pipeline.nodes={as_toml([{**node, 'function': f'python:{file}:hangs'}])}")
    assert other.finish() != 0
    said = other.everything_said()
    assert "NodeFailed" in said and "no answer within pipeline.nodes 'n'.timeout_s = 1 s" in said and "in hangs" in said
