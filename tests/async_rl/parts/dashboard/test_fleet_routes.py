"""The dashboard at the fleet endpoint of a live run."""

import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.parts.dashboard.page import STATIC
from tests.support.synthetic_run import SyntheticRun

A = "http://10.0.0.1:8000"


def test_a_live_run_shows_its_records_from_its_first_iteration_on(make_pool, serve, tmp_path: Path) -> None:
    endpoint = serve(make_pool(A), run_dir=tmp_path)
    assert endpoint.ask("/dashboard/api/records?run=0")[1]["metrics"]["iterations"] == []
    run = SyntheticRun(tmp_path, num_iterations=3)
    run.write()
    status, records = endpoint.ask("/dashboard/api/records?run=0")
    assert status == 200
    assert records["metrics"]["columns"]["loss"] == [run.record(i)["loss"] for i in range(3)]
    assert len(endpoint.ask("/dashboard/api/period?run=0&iteration=2")[1]["groups"]) == run.num_groups
    assert endpoint.ask("/dashboard/api/period?run=0")[0] == 400
    with urllib.request.urlopen(f"{endpoint.url}/dashboard/api/events", timeout=30) as answer:
        assert answer.readline().startswith(b'data: [{"generation":')


def test_with_a_token_only_the_page_is_open(make_pool, serve, tmp_path: Path) -> None:
    endpoint = serve(make_pool(A), token="secret", run_dir=tmp_path)
    assert endpoint.ask("/dashboard/api/runs")[0] == 200
    endpoint.token = None
    for path in ("api/runs", "api/records?run=0", "api/events", "api/samples?run=0", "nothing"):
        assert endpoint.ask(f"/dashboard/{path}")[0] == 401
    for name in ("", *STATIC):
        with urllib.request.urlopen(f"{endpoint.url}/dashboard/{name}", timeout=60) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_without_a_token_another_sites_name_for_the_host_is_refused(make_pool, serve, tmp_path: Path) -> None:
    endpoint = serve(make_pool(A), run_dir=tmp_path)
    for path in ("/dashboard/api/runs", "/dashboard/api/events"):
        connection = HTTPConnection(urlsplit(endpoint.url).netloc, timeout=60)
        connection.request("GET", path, headers={"Host": "rebound.example"})
        assert connection.getresponse().status == 403
        connection.close()


def test_a_fleet_without_a_directory_has_no_dashboard(make_pool, serve) -> None:
    assert serve(make_pool(A)).ask("/dashboard/api/runs")[0] == 404
