"""An instance that holds what was sent last is sent what changed; in any doubt it is sent all, and serves the same."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.shared.weights.changes import LastSent
from async_rl.shared.weights.snapshot import SnapshotWriter

pytestmark = pytest.mark.distributed

PROMPT = [2 + i % 90 for i in range(40)]
FEW = 20
"""Values that are changed in a tensor."""


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_moe", tied=True)


@pytest.fixture
def server(launch_instance: Callable[..., Any], checkpoint: Path) -> Any:
    return launch_instance(checkpoint)


@pytest.fixture
def model(checkpoint: Path, load_reference: Callable[[Path], torch.nn.Module]) -> torch.nn.Module:
    return load_reference(checkpoint)


def change(model: torch.nn.Module) -> None:
    """A few values of each large tensor, all of the small ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            chosen = torch.randperm(flat.numel())[:FEW]
            flat[chosen] += torch.randn(len(chosen)) * 0.1


class Publishes:
    """Publishes of a model that goes on changing, to one instance."""

    def __init__(
        self, side: Any, server: Any, model: torch.nn.Module, reference: Callable[..., list[float]], last: LastSent
    ) -> None:
        self._side, self._server, self._model, self._reference = side, server, model, reference
        side.last = last
        self.whole = sum(spec.num_bytes for spec, _ in side.stream(model))
        self._number = 0

    def publish(self) -> float:
        """The share of all bytes that was sent; the instance then computes with the model."""
        self._number += 1
        version = f"v{id(self)}-{self._number}"
        sent = self._side.publish(self._model, version)
        (held,) = self._server.post("/collective_rpc", {"method": "weight_fingerprint"})["results"]
        assert held == sent
        self.require_served(version)
        return float(self._side.group.num_bytes_sent / self.whole)

    def require_served(self, version: str) -> None:
        for choice in self._server.generate(PROMPT, n=2, max_tokens=8)["choices"]:
            found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            expected = self._reference(self._model, PROMPT, choice["token_ids"], 1.0)
            assert found == pytest.approx(expected, abs=1e-4)
            assert {span["version"] for span in choice["weight_versions"]} == {version}


def test_what_changed_is_sent_alone_to_one_that_holds_the_rest(
    server: Any, trainer_side: Any, model: torch.nn.Module, reference: Callable[..., list[float]], tmp_path: Path
) -> None:
    last = LastSent()
    publishes = Publishes(trainer_side([server]), server, model, reference, last)
    assert publishes.publish() == 1, "it has never been sent any"
    assert publishes.publish() < 0.01, "nothing has changed"
    for _ in range(2):
        change(model)
        assert publishes.publish() < 0.3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert publishes.publish() == 1, "changes of all are no fewer bytes"
    change(model)
    assert publishes.publish() < 0.3

    # In a new group, of another trainer.
    again = Publishes(trainer_side([server]), server, model, reference, last)
    assert again.publish() == 1, "what all take over its links is not known"
    change(model)
    assert again.publish() < 0.3
    other = Publishes(trainer_side([server]), server, model, reference, LastSent())
    change(model)
    assert other.publish() == 1, "that trainer does not know what the instance holds"
    again = Publishes(trainer_side([server]), server, model, reference, last)
    assert again.publish() == 1, "the instance holds what this one has not sent"


def test_after_a_stream_that_broke_all_is_sent(
    server: Any, trainer_side: Any, model: torch.nn.Module, reference: Callable[..., list[float]]
) -> None:
    last = LastSent()
    side = trainer_side([server])
    Publishes(side, server, model, reference, last).publish()
    change(model)
    server.client.post("/pause", params={"mode": "keep"}).raise_for_status()
    server.post("/start_weight_update")
    stream = side.stream(model)
    (call,) = side.call_update(stream, status=500)

    def breaks() -> Any:
        yield from stream[:5]
        raise RuntimeError("the trainer fails")

    with pytest.raises(RuntimeError, match="the trainer fails"):
        side.group.send(breaks(), 20_000, last)
    side.die()
    assert "broke" in call.result()["error"]["message"]
    assert last.fingerprint is None
    assert Publishes(trainer_side([server]), server, model, reference, last).publish() == 1


def test_changes_that_take_long_to_find_are_waited_for(
    server: Any, trainer_side: Any, model: torch.nn.Module, reference: Callable[..., list[float]]
) -> None:
    """More than both of an instance's timeouts: the sender has begun, and says so."""
    last = LastSent()
    side = trainer_side([server], timeout_s=1.0)
    publishes = Publishes(side, server, model, reference, last)
    publishes.publish()
    change(model)
    stream = side.stream(model)

    def slowly() -> Any:
        for number, item in enumerate(stream):
            time.sleep(0.7 if number < 5 else 0.0)
            yield item

    server.client.post("/pause", params={"mode": "keep"}).raise_for_status()
    server.post("/start_weight_update")
    (call,) = side.call_update(stream)
    side.group.send(slowly(), 20_000, last)
    call.result()
    assert side.group.num_bytes_sent < 0.3 * publishes.whole
    server.post("/finish_weight_update", {"weight_version": "slow"})
    server.post("/resume")
    publishes.require_served("slow")


def test_one_that_has_read_the_snapshot_of_what_was_sent_holds_it_too(
    launch_instance: Callable[..., Any],
    checkpoint: Path,
    trainer_side: Any,
    model: torch.nn.Module,
    reference: Callable[..., list[float]],
    tmp_path: Path,
) -> None:
    first, joins = launch_instance(checkpoint), launch_instance(checkpoint)
    last = LastSent()
    publishes = Publishes(trainer_side([first]), first, model, reference, last)
    publishes.publish()
    stream = trainer_side([first]).stream(model)
    writer = SnapshotWriter(tmp_path / "v.safetensors", [spec for spec, _ in stream])
    writer.write(iter(stream))
    joins.post("/pause")
    joins.post("/start_weight_update")
    info = publishes._side.update_info(stream)
    info["update_info"]["snapshot"] = str(writer.commit())
    joins.post("/update_weights", info)
    joins.post("/finish_weight_update", {"weight_version": "v"})
    joins.post("/resume")
    change(model)
    side = trainer_side([first, joins])
    # As if it were known what all take over these links.
    side.group.choice.sent_all(0.0)
    both = Publishes(side, joins, model, reference, last)
    assert both.publish() < 0.3
