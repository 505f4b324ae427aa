import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.rollouts.fleet.server import FleetServer
from async_rl.shared.protocol.inference import SamplingParams
from tests.support import ROOT

pytestmark = pytest.mark.distributed

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def begin(*arguments: str, cwd: Path | None = None, token: str | None = None) -> "subprocess.Popen[str]":
    """`async-rl fleet ARGUMENTS`, begun."""
    root = str(ROOT)
    environment = {key: value for key, value in os.environ.items() if key != "ASYNC_RL_TOKEN"} | {"PYTHONPATH": root}
    if token is not None:
        environment["ASYNC_RL_TOKEN"] = token
    return subprocess.Popen(
        [sys.executable, "-m", "async_rl.rollouts.fleet.cli", *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fleet(*arguments: str, cwd: Path | None = None, token: str | None = None) -> tuple[int, str, str]:
    """`async-rl fleet ARGUMENTS`: exit code, standard output and error."""
    with begin(*arguments, cwd=cwd, token=token) as process:
        output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def test_ls_shows_every_instance_and_why_it_is_not_ready(make_pool, serve) -> None:
    pool = make_pool(A, B)
    pool.note_useless(pool.members[0], "it said [bold]\x1b[31mno\x1b[0m")
    pool.members[0].num_tokens, pool.members[0].tokens_per_s = 12, 3456.7
    endpoint = serve(pool)
    endpoint.server.metrics.record_iteration({"desired_instances": 3})
    code, output, _ = fleet("ls", "--url", endpoint.url)
    assert code == 0
    lines = output.splitlines()
    assert " ".join(lines[0].split()) == "name url state version outstanding tokens/s requests failures reason"
    assert lines[1].split()[:3] == ["10.0.0.1:8000", A, "joining"] and "3,457" in lines[1]
    assert "it said [bold]" in lines[1] and "\x1b" not in output
    assert "3 would balance the pools" in lines[-1]


def test_ls_shows_names_and_urls_as_they_are(make_pool, serve) -> None:
    """An IPv6 address in its brackets is what rich takes for markup."""
    pool = make_pool("http://[fd00::2]:8000")
    pool.members[0].name = "[red]"
    code, output, _ = fleet("ls", "--url", serve(pool).url)
    assert (code, output.splitlines()[1].split()[:2]) == (0, ["[red]", "http://[fd00::2]:8000"])


def test_ls_json_is_what_the_endpoint_answers(make_pool, serve) -> None:
    endpoint = serve(make_pool(A))
    code, output, _ = fleet("ls", "--json", "--url", endpoint.url + "/")
    assert code == 0 and json.loads(output) == endpoint.ask("/fleet")[1]


def test_instances_are_added_and_removed(make_pool, serve) -> None:
    pool = make_pool(A)
    url = serve(pool).url
    code, output, _ = fleet("add", B + "/", "--name", "late", "--url", url)
    assert code == 0 and output.startswith(f"late ({B}) is joining")
    code, output, _ = fleet("remove", "late", "--url", url)
    assert code == 0 and [member.url for member in pool.members] == [A]


def test_the_newest_run_that_goes_on_is_found(make_pool, loop, tmp_path: Path) -> None:
    servers = []
    for age_s, name in ((0, "new"), (60, "old")):
        run_dir = tmp_path / "runs" / name
        run_dir.mkdir(parents=True)
        servers.append(FleetServer(make_pool(A if name == "old" else B), PoolSection(), None, run_dir))
        loop.run(servers[-1].start())
        os.utime(run_dir / "fleet.json", (time.time() - age_s,) * 2)
    assert B in fleet("ls", cwd=tmp_path)[1]
    assert A in fleet("ls", "--run", "runs/old", cwd=tmp_path)[1]
    for server in servers:
        loop.run(server.stop())


def test_bad_input_ends_with_2_and_says_what_helps(make_pool, serve, tmp_path: Path) -> None:
    url = serve(make_pool(A), token="secret").url
    (tmp_path / "fleet.json").write_text("{")
    for arguments, token, message in [
        (("ls",), None, "name one with --run RUN_DIR"),
        (("ls", "--run", "nowhere"), None, "the run has ended"),
        (("ls", "--run", "."), None, "does not hold the address"),
        (("ls", "--url", url), None, "set ASYNC_RL_TOKEN"),
        (("ls", "--url", url), "wrong", "set ASYNC_RL_TOKEN"),
        (("drain", "nobody", "--url", url), "secret", "no instance 'nobody': it has 10.0.0.1:8000"),
        (("add", A, "--url", url), "secret", "twice"),
        (("add", "10.0.0.9:8000", "--url", url), "secret", "'10.0.0.9:8000'"),
        (("ls", "--url", "10.0.0.1"), None, "'10.0.0.1' is not a URL"),
        (("ls", "--url", url + "/openapi.json"), "secret", "is it the fleet endpoint of a run?"),
        ((), None, "usage:"),
    ]:
        code, _, errors = fleet(*arguments, cwd=tmp_path, token=token)
        assert code == 2 and message in errors and "Traceback" not in errors, (arguments, errors)


def test_an_endpoint_that_does_not_answer_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text('{"url": "http://127.0.0.1:9"}')
    code, _, errors = fleet("ls", "--run", str(tmp_path))
    assert code == 1
    assert "no fleet endpoint answers at http://127.0.0.1:9: Connection refused; has the run ended?" in errors


def test_drain_waits_until_the_instance_has_finished_what_it_has(instances, make_pool, serve, loop) -> None:
    first, second = instances({"delay_s": 2.0}, {})
    pool = make_pool(first.url, second.url, timeout_s=30.0)
    loop.run(pool.wait_until_ready())
    loop.run(pool.end_publish("v1", [first.url]))
    sampling = SamplingParams(n=2, max_tokens=8, seed=4096, logprobs=0)
    rollout = loop.submit(pool.generate_group((3, 4), sampling, "v1-0", "v1"))
    url = serve(pool).url
    with begin("drain", first.url, "--wait", "--url", url) as process:
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    responses, attempts = rollout.result(timeout=60)
    assert attempts == 1 and {response.instance for response in responses} == {first.url}
    assert [member.url for member in pool.members] == [second.url]
    assert "drains: it finishes" in output and "has left the pool" in output


def test_waiting_for_a_drained_instance_ends_when_it_is_started_anew(make_pool, serve, eventually) -> None:
    pool = make_pool(A)
    endpoint = serve(pool)
    endpoint.ask("/fleet/register", {"url": B, "name": "pod-2", "boot_id": "b1"})
    with begin("drain", "pod-2", "--wait", "--url", endpoint.url) as process:
        eventually(lambda: pool.find("pod-2").state == "draining")
        endpoint.ask("/fleet/register", {"url": B, "name": "pod-2", "boot_id": "b2"})
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 1 and "pod-2 is joining again before it left" in errors


def test_what_a_removed_instance_began_goes_on_at_another(instances, make_pool, serve, loop, eventually) -> None:
    first, second = instances({"slow_token": 3}, {})
    pool = make_pool(first.url, second.url, timeout_s=30.0)
    loop.run(pool.wait_until_ready())
    loop.run(pool.end_publish("v1", [first.url]))
    sampling = SamplingParams(n=2, max_tokens=8, seed=4096, logprobs=0)
    rollout = loop.submit(pool.generate_group((3, 4), sampling, "v1-0", "v1"))
    eventually(lambda: len(first.seen()["requests"]) == 1)
    loop.run(pool.end_publish("v1", [first.url, second.url]))
    assert fleet("remove", first.url, "--url", serve(pool).url)[0] == 0
    responses, _ = rollout.result(timeout=60)
    assert {response.instance for response in responses} == {second.url}
