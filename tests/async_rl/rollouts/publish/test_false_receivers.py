"""Two instances on the sender's host, of which one says what is not so, in the weight group or over HTTP."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights import ipc
from tests.support.publishing import Publishing, StreamPublisher, publish, sums
from tests.support.receiving_instance import LIES

pytestmark = pytest.mark.distributed

HARMLESS = {
    *("it has copied what others have not", "others accept", "pieces are ready", "words of the sender"),
    *("others have not copied", "no piece is ready", "others are lost", "it is the others", "another record"),
}
"""The store refuses them, and the one that tells them receives everything."""


@pytest.fixture(scope="module")
def pair(start_receivers: Callable[..., list[Any]]) -> list[Any]:
    return start_receivers({}, {})


@pytest.fixture
def make(
    loop: EventLoopThread, pair: list[Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[StreamPublisher, InferencePool]]]:
    # A publish is of 25 pieces.
    monkeypatch.setattr(ipc, "PIECE_BYTES", 1000)
    publishing = Publishing(loop)
    yield lambda *instances, **options: publishing.make(*instances, **{"transport": "ipc"} | options)
    publishing.close()
    for instance in pair:
        instance.rescript(lie=None, answers=None, poses=False)


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("lie", LIES)
def test_a_false_member_harms_and_blames_nobody_else(pair: list[Any], make: Any, lie: str, liar: int) -> None:
    publisher, pool = make(*pair, timeout_s=1.5)
    publish(publisher, "run-0")
    honest = pair[1 - liar]
    pair[liar].rescript(lie=lie)
    for number in (1, 2):
        urls = publish(publisher, f"run-{number}", float(number + 1))
        assert honest.url in urls and honest.sums() == sums(float(number + 1))
        assert (pair[liar].url in urls) == (lie in HARMLESS)
        assert pool.members[1 - liar].reason is None
    if lie not in HARMLESS:
        assert pair[liar].url in (pool.members[liar].reason or "")
    pair[liar].rescript(lie=None)
    assert len(publish(publisher, "run-3", 5.0)) == 2 and pair[liar].sums() == honest.sums() == sums(5.0)


@pytest.mark.parametrize("lie", sorted(HARMLESS))
def test_what_a_member_says_for_others_is_refused_in_the_group_of_each_stage(
    pair: list[Any], make: Any, lie: str
) -> None:
    publisher, _ = make(*pair, transport="stages", num_stages=3)
    publish(publisher, "run-0")
    pair[0].rescript(lie=lie)
    for scale in (2.0, 3.0):
        assert len(publish(publisher, f"run-{scale}", scale)) == 2
        assert [each.sums() for each in pair] == [sums(scale)] * 2


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_one_that_comes_as_another_member_is_left_out_itself(
    pair: list[Any], loop: EventLoopThread, transport: str
) -> None:
    liar, honest = pair
    publishing = Publishing(loop)
    publisher, pool = publishing.make(*pair, transport=transport, probes=False)
    # It comes first.
    liar.rescript(poses=True)
    honest.rescript(stall=["come", 0.5])
    assert publish(publisher, "run-0") == (honest.url,) and honest.sums() == sums()
    assert "cannot be the one of 'lost/2'" in (pool.members[0].reason or "") and pool.members[1].reason is None
    liar.rescript(poses=False)
    assert len(publish(publisher, "run-1", 2.0)) == 2
    publishing.close()


ANSWERS: dict[str, dict[str, Any]] = {
    "/get_world_size": {"world_size": 1},
    "/collective_rpc": {"results": ["0" * 32]},
    "/weight_info": {"weight_version": "run-0"},
}
VALUES = (
    None,
    0,
    -1,
    2,
    4097,
    10**12,
    1.5,
    float("nan"),
    float("-inf"),
    "",
    "x",
    "\ud800",
    [],
    [None],
    {},
    [[]],
    {"a": 1},
)


def falsified(answer: dict[str, Any]) -> Iterator[str]:
    """Bodies with another content, of another type, shorter, longer, or none."""
    (field, right), text = *answer.items(), json.dumps(answer)  # type: ignore[misc]
    for value in VALUES:
        yield json.dumps({field: value})
        yield json.dumps(value)
        if isinstance(right, list):
            yield json.dumps({field: [value]})
            yield json.dumps({field: [*right, value]})
    yield from (text[:end] for end in range(1, len(text), 7))
    yield from ("", "[" * 100_000, text + "x", json.dumps({field: int("9" * 4000)}), json.dumps({"other": right}))


@pytest.mark.parametrize("route", ANSWERS)
def test_an_answer_of_whatever_content_is_named_and_leaves_only_its_sender_out(
    pair: list[Any], make: Any, route: str
) -> None:
    honest, liar = pair
    for number, body in enumerate(falsified(ANSWERS[route])):
        # Another publisher has not given it up.
        publisher, pool = make(honest, liar, timeout_s=2.0)
        liar.rescript(answers={route: body})
        assert publish(publisher, f"run-{number}", number + 2.0) == (honest.url,), body[:100]
        assert honest.sums() == sums(number + 2.0)
        assert liar.url in (pool.members[1].reason or ""), body[:100]


def test_a_fingerprint_that_was_true_once_is_not_taken_again(pair: list[Any], make: Any) -> None:
    publisher, pool = make(*pair)
    publish(publisher, "run-0", 3.0)
    held = pair[1]._ask("/collective_rpc", json.dumps({"method": "weight_fingerprint"}).encode())
    pair[1].rescript(answers={"/collective_rpc": json.dumps(held)})
    assert publish(publisher, "run-1", 2.0) == (pair[0].url,)
    assert f"{pair[1].url} received weights with fingerprints {held['results']}" in (pool.members[1].reason or "")
