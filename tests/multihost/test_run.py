"""A whole run with its pools on other hosts: real instances, the real trainer, nothing said about interfaces."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.common.hosts import Hosts, why_not
from tests.support.local_run import Run
from tests.support.programs import Programs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

FLEET_PORT = 8600
PORT = 8001
FINISH_S = 240


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Names lie: the trainer's is loopback, as Debian has it, the listed instance's is of another network."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    hosts = Hosts(
        {"office": "/24", "data": "/24"},
        {
            "trainer": {"none": "127.0.1.1", "office": "10.78.1.1", "data": "10.78.2.1"},
            "listed": {"office": "10.78.1.2", "data": "10.78.2.2"},
            "coming": {"data": "10.78.2.3"},
        },
    )
    yield hosts
    hosts.close()


def test_a_run_between_three_hosts_is_on_policy(
    hosts: Hosts, programs: Programs, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model("qwen3", tied=True)
    run = Run(tmp_path, model)
    run.dir.mkdir()
    listed_log, coming_log = tmp_path / "listed.txt", tmp_path / "coming.txt"
    serve = ["inference_service", "--model", str(model), "--host", "0.0.0.0"]
    serve += ["--port", str(PORT), "--logprobs-mode", "processed_logprobs"]
    settings = {
        "pool.instances": f'["http://10.78.2.2:{PORT}"]',
        "pool.timeout_s": FINISH_S,
        "pool.fleet_address": f"0.0.0.0:{FLEET_PORT}",
        "train.iterations": 2,
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    launcher = ["torch.distributed.run", "--nproc-per-node", "1", "--standalone", "-m", "async_rl.trainer"]
    trainer = programs.start_module(hosts["trainer"], [*launcher, str(run.config), *overrides], run.output)
    register = ["--register", f"http://10.78.2.1:{FLEET_PORT}", "--name", "coming"]
    coming = programs.start_module(hosts["coming"], [*serve, *register], coming_log)
    deadline = time.monotonic() + FINISH_S
    while "registered with the fleet" not in coming_log.read_text():
        assert trainer.poll() is None and coming.poll() is None, run.output.read_text() + coming_log.read_text()
        assert time.monotonic() < deadline, run.output.read_text() + coming_log.read_text()
        time.sleep(0.1)
    # The trainer waits for the listed one, so both take part from the first publish on.
    programs.start_module(hosts["listed"], serve, listed_log)
    code = trainer.wait(FINISH_S)
    assert code == 0, "\n".join(log.read_text() for log in (run.output, listed_log, coming_log))
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [0, 1]
    assert all(proof["on_policy"] and proof["num_responses"] == 24 for proof in proofs), proofs
    assert len({proof["fingerprint"] for proof in proofs}) == 2, "every step changes the weights"
    assert [record["num_instances"] for record in run.lines("metrics.jsonl")] == [2, 2]
