"""Both ends of a sender's calls: what passes, what is refused, and under which name an error arrives."""

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from async_rl.config.pool_section import PublishSection
from async_rl.errors import ConfigError, InstanceRefused, LeaderFailed, PublishError
from async_rl.rollouts.publish.remote_sender import METHODS, RemoteSender, serve
from async_rl.shared.weights.sender import WeightSender, WeightSource
from tests.support.publishing import SPECS, remote, stream


class Source:
    """Scores and changes whatever it is asked to, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.strengths: Mapping[str, int] = {}

    def score(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        if self.error is not None:
            raise self.error
        return [[math.nan, -math.inf, -0.1][: len(response)] for response in responses]

    def change(self, strengths: Mapping[str, int]) -> None:
        self.strengths = strengths

    def sender(self, **settings: Any) -> WeightSender:
        source = WeightSource(SPECS, stream, self.score, self.change, ("q", "head"), ())
        return WeightSender(source, PublishSection(**settings), "run")


def test_all_methods_of_a_sender_can_be_called_and_give_what_they_give_here() -> None:
    source = Source()
    here = source.sender()
    there = remote(here)
    assert set(METHODS) == {name for name in vars(RemoteSender) if not name.startswith("_")}
    assert there.facts() == here.facts() and there.facts().classes == ["q", "head"]
    there.change({"q": -1})
    assert source.strengths == {"q": -1}
    (logprobs,) = there.score([1], [(2, 3, 4)])
    assert math.isnan(logprobs[0]) and logprobs[1:] == [-math.inf, -0.1]
    (info,) = there.form(["localhost"], [1]).infos
    assert (info["rank_offset"], info["world_size"]) == (1, 2)
    forming = there.wait_formed(0.0)
    assert (forming.has_ended, forming.problem, forming.absent) == (False, None, [1])
    assert there.call_off([1])
    assert set(there.form(["no-such-host.invalid", "localhost"], [1, 1]).without_route) == {"no-such-host.invalid"}
    there.leave_group()
    there.watch()


def test_facts_are_asked_once() -> None:
    calls: list[str] = []
    here = Source().sender()

    def call(name: str, arguments: list[Any]) -> Any:
        calls.append(name)
        return serve(here, name, arguments)

    there = RemoteSender(call)
    assert there.facts() is there.facts() and calls == ["facts"]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConfigError("no room"), ConfigError, "^no room"),
        (PublishError("nobody"), PublishError, "^nobody"),
        (KeyError("q"), LeaderFailed, "^the main training rank failed by an internal error, KeyError: 'q'\nTraceback"),
        (InstanceRefused("no", 500), InstanceRefused, "^no"),
        (OSError("disk"), LeaderFailed, "failed by an internal error, OSError: disk"),
    ],
)
def test_an_error_arrives_under_its_name_or_as_that_of_the_main_rank(
    error: Exception, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        remote(Source(error).sender()).score([1], [[2]])
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("close", []),
        ("__init__", []),
        ("send", []),
        ("send", [1]),
        ("send", ["v", "w"]),
        ("form", ["localhost", [1]]),
        ("form", [["localhost"], ["1"]]),
        ("wait_formed", ["soon"]),
        ("change", [{"q": "1"}]),
    ],
)
def test_what_is_no_call_of_a_sender_is_refused(name: str, arguments: list[Any]) -> None:
    with pytest.raises(ValueError):
        serve(Source().sender(), name, arguments)


@pytest.mark.parametrize("answer", [1, [], {"error": "ConfigError", "text": ""}, "text"])
def test_an_answer_of_another_kind_is_a_named_error(answer: Any) -> None:
    with pytest.raises(LeaderFailed, match="answered leave_group with"):
        RemoteSender(lambda name, arguments: answer).leave_group()


@pytest.mark.distributed
def test_the_control_side_of_publishing_needs_no_torch() -> None:
    code = "import sys; from async_rl.rollouts.publish import publisher, remote_sender; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
