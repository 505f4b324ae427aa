import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from async_rl.errors import RunDirInUse
from deploy.cluster.fleet import read_fleet, require_no_trainer

FLEET = '{"instances": [], "desired_instances": %s}'


class Trainer(ThreadingHTTPServer):
    """A fleet endpoint that answers `says` with `status`."""

    says = b""
    status = 200


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Trainer)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.says)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    server = Trainer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "fleet.json").write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}))
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "2.5", '"many"', "[]", "{}"])
def test_a_number_of_instances_that_is_none_is_no_answer(trainer: Trainer, tmp_path: Path, number: str) -> None:
    trainer.says = (FLEET % number).encode()
    assert read_fleet(tmp_path, None) is None


@pytest.mark.parametrize("says", [b"", b"\xff", b"[]", b"null", b"{}", b"<html>"])
def test_an_answer_of_something_else_is_that_of_no_trainer(trainer: Trainer, tmp_path: Path, says: bytes) -> None:
    trainer.says = says
    assert read_fleet(tmp_path, None) is None
    require_no_trainer(tmp_path, None)


def test_a_run_whose_trainer_answers_is_in_use(trainer: Trainer, tmp_path: Path) -> None:
    trainer.says = (FLEET % 3).encode()
    with pytest.raises(RunDirInUse, match="end that run, or name another"):
        require_no_trainer(tmp_path, None)
    trainer.status = 409  # As one of another run answers, at the port of a trainer that was killed.
    require_no_trainer(tmp_path, None)
