import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

import pytest

from async_rl.errors import (
    BrokenAnswer,
    InstanceError,
    InstanceRefused,
    InstanceRestarted,
    InstanceStalled,
    InstanceUnreachable,
    NeedsWeights,
    StaleWeights,
)
from async_rl.method.types import Response
from async_rl.rollouts.instance.client import Connections, HeldWeights, InstanceClient
from async_rl.rollouts.instance.dialect import EMBEDDED, VLLM, VLLM_WITHOUT_VERSIONS
from async_rl.rollouts.instance.partial_rollout import PartialRollout, stream_interval
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.inference import SamplingParams

pytestmark = pytest.mark.distributed

Connect = Callable[..., InstanceClient]
SAMPLING = SamplingParams(n=3, max_tokens=8, seed=1024, logprobs=0)
LONG = 1039
"""A seed whose response takes all the tokens that it may have."""


@pytest.fixture
def connect(loop: EventLoopThread) -> Iterator[Connect]:
    opened: list[Connections] = []

    def connect(url: str, *, request_timeout_s: float = 10.0, token: str | None = None) -> InstanceClient:
        opened.append(Connections(token))
        client = InstanceClient(opened[-1], url, request_timeout_s)
        client._dialect = EMBEDDED  # what scripted instances say unless their script says otherwise
        return client

    yield connect
    for connections in opened:
        loop.run(connections.close())


def new_partials(sampling: SamplingParams = SAMPLING) -> list[PartialRollout]:
    return [PartialRollout(sampling.seed + j) for j in range(sampling.n)]


async def generate(client: InstanceClient, sampling: SamplingParams = SAMPLING) -> list[Response]:
    partials = new_partials(sampling)
    await client.generate((3, 4, 5), sampling, "v1-0", "v1", partials)
    return [partial.response() for partial in partials]


def test_generate_returns_n_responses_with_a_logprob_and_a_version_for_every_token(
    instances, connect: Connect, loop: EventLoopThread
) -> None:
    (instance,) = instances({})
    responses = loop.run(generate(connect(instance.url + "/")))
    assert len(responses) == 3
    for response in responses:
        assert len(response.token_ids) == len(response.logprobs) >= 1
        assert response.weight_spans[-1].end == len(response.token_ids)
        assert response.instance == instance.url and response.finish_reason in ("stop", "length")
    (request,) = instance.seen()["requests"]
    assert (request["token_ids"], request["request_id"]) == ([3, 4, 5], "v1-0")
    sent = SAMPLING.model_copy(update={"stream_interval": stream_interval(SAMPLING.max_tokens)})
    assert request["stream"] is True and request["sampling_params"] == sent.model_dump(exclude_none=True)
    assert responses == loop.run(generate(connect(instance.url)))


def test_completions_serve_where_generate_is_missing(instances, connect: Connect, loop: EventLoopThread) -> None:
    with_generate, without = instances({}, {"serve_generate": False})
    client = connect(without.url)
    responses = loop.run(generate(client))
    expected = loop.run(generate(connect(with_generate.url)))
    assert [(r.token_ids, r.logprobs) for r in responses] == [(r.token_ids, r.logprobs) for r in expected]
    loop.run(generate(client))
    calls = without.seen()["calls"]
    assert calls == ["/inference/v1/generate"] + ["/weight_info", "/v1/completions", "/weight_info"] * 2
    without.rescript(version="v0")
    with pytest.raises(StaleWeights, match="'v0', asked for 'v1'"):
        loop.run(generate(client))


def test_refusal_carries_status_and_the_servers_words(instances, connect: Connect, loop: EventLoopThread) -> None:
    (instance,) = instances({"token": "secret"})
    with pytest.raises(InstanceRefused, match="with 400: prompt and max_tokens are longer than the model") as caught:
        loop.run(generate(connect(instance.url, token="secret"), SamplingParams(max_tokens=100, seed=0)))
    assert caught.value.status == 400
    with pytest.raises(InstanceRefused, match="with 401: a bearer token is needed"):
        loop.run(connect(instance.url).health())


def test_silence_and_a_closed_port_are_unreachable(instances, connect: Connect, loop: EventLoopThread) -> None:
    (instance,) = instances({"hang_at": 0})
    with pytest.raises(InstanceUnreachable, match=r"made no token of a request for 0\.2 s, nor of any other"):
        loop.run(generate(connect(instance.url, request_timeout_s=0.2)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InstanceUnreachable, match=url):
        loop.run(connect(url).health())


def test_instance_that_dies_in_a_request_is_unreachable(instances, connect: Connect, loop: EventLoopThread) -> None:
    (instance,) = instances({"die_at": 0})
    with pytest.raises(InstanceUnreachable, match=instance.url):
        loop.run(generate(connect(instance.url)))


def test_body_of_another_protocol_is_an_error_that_names_the_route(
    instances, connect: Connect, loop: EventLoopThread
) -> None:
    (instance,) = instances({"max_model_len": "long"})
    with pytest.raises(InstanceError, match="answered /v1/models with a body of another protocol"):
        loop.run(connect(instance.url).max_model_len())


def test_a_streamed_answer_is_the_same_as_one_at_once(instances, connect: Connect, loop: EventLoopThread) -> None:
    streaming, at_once, at_end = instances({"stream": True}, {}, {"stream": True, "versions_at_end": True})
    expected = [(r.token_ids, r.logprobs, r.finish_reason) for r in loop.run(generate(connect(at_once.url)))]
    for instance in (streaming, at_end):
        client = connect(instance.url)
        responses = loop.run(generate(client))
        assert client.streams
        assert [(r.token_ids, r.logprobs, r.finish_reason.replace("length", "stop")) for r in responses] == [
            (t, p, f.replace("length", "stop")) for t, p, f in expected
        ]
        assert {r.weight_versions for r in responses} == {frozenset({"v1"})}


@pytest.mark.parametrize("owner", ["async-rl", "vllm"])
def test_a_prefix_survives_the_instance_and_is_continued(
    instances, connect: Connect, loop: EventLoopThread, owner: str
) -> None:
    dying, whole = instances(
        {"stream": True, "stop_after": 2, "fate": "die", "owner": owner, "versions_at_end": owner == "vllm"},
        {"stream": True, "owner": owner},
    )
    partials = new_partials()
    clients = [connect(dying.url), connect(whole.url)]
    for client in clients:
        loop.run(client.learn_dialect())
    boot_id = loop.run(clients[0].health())
    with pytest.raises(InstanceUnreachable):
        loop.run(clients[0].generate((3, 4, 5), SAMPLING, "v1-0", "v1", partials, boot_id=boot_id))
    for partial in partials:
        prefix = list(partial.token_ids)
        assert 1 <= len(prefix) <= 2
        if partial.finish_reason is None:
            loop.run(clients[1].generate((3, 4, 5), SAMPLING, "v1-0", "v1", [partial]))
            request = whole.seen()["requests"][-1]
            assert request["token_ids"] == [3, 4, 5, *prefix]
            assert request["sampling_params"]["max_tokens"] == SAMPLING.max_tokens - 2
            # Under the same seed vLLM's noise would repeat that which has shaped the prefix.
            assert request["sampling_params"].get("seed") == (partial.seed if owner == "async-rl" else None)
        assert list(partial.token_ids[: len(prefix)]) == prefix
        assert partial.response().weight_versions == {"v1"}
    if owner == "async-rl":
        expected = loop.run(generate(connect(whole.url)))
        assert [partial.response().token_ids for partial in partials] == [response.token_ids for response in expected]


def test_vllm_is_sent_no_seeds(instances, connect: Connect, loop: EventLoopThread) -> None:
    for script in ({"server": "0.32.0"}, {"server": "0.23.0", "serve_generate": False}):
        (instance,) = instances(script | {"owner": "vllm"})
        client = connect(instance.url)
        loop.run(client.learn_dialect())
        client._dialect = replace(client.dialect, keeps_version=True)
        loop.run(generate(client))
        (request,) = instance.seen()["requests"]
        assert "seed" not in request and "seed" not in request.get("sampling_params", {})


OTHER_BOOT = "the-process-before"


def test_tokens_of_another_process_than_was_put_in_service_are_refused_before_they_come(
    instances, connect: Connect, loop: EventLoopThread
) -> None:
    (instance,) = instances({"stream": True, "versions_at_end": True})
    partials = new_partials()
    with pytest.raises(InstanceRestarted, match=f"was started anew.*'{OTHER_BOOT}' was put in service"):
        loop.run(connect(instance.url).generate((3,), SAMPLING, "v1-0", "v1", partials, boot_id=OTHER_BOOT))
    assert not any(partial.token_ids for partial in partials)


TORN = {"stream": True, "versions_at_end": True, "stop_after": 2, "fate": "tear", "owner": "vllm"}


@pytest.mark.parametrize("boot_id", ["caf\u00e9", "\u200b", "two words", "x" * 65, "a,b", "\U0001f600"])
def test_a_header_that_cannot_name_a_process_is_refused_where_it_enters(
    instances, connect: Connect, loop: EventLoopThread, boot_id: str
) -> None:
    """Later it would be written into others' answers, as what others report."""
    (instance,) = instances({"boot_id": boot_id})
    client = connect(instance.url)
    calls = (
        client.health,
        client.holding,
        lambda: client.generate((3,), SAMPLING, "v1-0", "v1", new_partials()),
    )
    for call in calls:
        with pytest.raises(InstanceError, match=r"X-Async-RL-Boot-Id .*expected at most 64 letters"):
            loop.run(call())


@pytest.mark.parametrize(
    ("script", "boot_id", "is_kept"),
    [
        ({}, "same", True),
        ({"version": "v0"}, "same", False),
        ({"boot_id": None, "start_time": "17.5"}, "started-17.5", True),
        ({"boot_id": None, "start_time": "18.5"}, "started-17.5", False),
        ({"boot_id": None, "start_time": "17.5", "version": "default"}, "started-17.5", False),
        ({"boot_id": None}, "started-17.5", False),
        ({"boot_id": None}, None, False),
        ({}, None, False),
    ],
)
def test_tokens_of_a_broken_answer_stay_only_if_process_and_version_show_what_made_them(
    instances, connect: Connect, loop: EventLoopThread, script: dict, boot_id: str | None, is_kept: bool
) -> None:
    (instance,) = instances(TORN | {"boot_id": "same"} | script)
    partials = new_partials(SAMPLING.model_copy(update={"n": 1, "seed": 1039}))
    with pytest.raises(InstanceUnreachable):
        loop.run(connect(instance.url).generate((3,), SAMPLING, "v1-0", "v1", partials, boot_id=boot_id))
    assert len(partials[0].token_ids) == (2 if is_kept else 0)
    assert len(partials[0].spans) == is_kept


@pytest.mark.parametrize("status", [200, 500])
def test_a_body_without_end_is_cut(instances, connect: Connect, loop: EventLoopThread, status: int) -> None:
    """Before, it filled the trainer's memory, gigabytes in seconds."""
    (instance,) = instances({"endless_body": "/inference/v1/generate", "endless_status": status})
    begun = time.monotonic()
    with pytest.raises(BrokenAnswer, match=f"instance {instance.url}: the body of an answer has no end after"):
        loop.run(connect(instance.url, request_timeout_s=60.0).generate((3,), SAMPLING, "v1-0", "v1", new_partials()))
    instance.rescript(endless_body="/health")
    with pytest.raises(BrokenAnswer, match=f"instance {instance.url}: the body of an answer has no end after"):
        loop.run(connect(instance.url).health(60.0))
    assert time.monotonic() - begun < 30


def test_an_address_that_leads_to_another_instance_is_none(instances, connect: Connect, loop: EventLoopThread) -> None:
    """Followed, the two would be one instance that is asked everything twice, its updates included."""
    (sound,) = instances({})
    (alias,) = instances({"elsewhere": sound.url})
    with pytest.raises(InstanceRefused, match="refused GET /health with 307"):
        loop.run(connect(alias.url).health())
    with pytest.raises(InstanceRefused, match="refused POST /inference/v1/generate with 307"):
        loop.run(generate(connect(alias.url)))
    assert "/health" not in sound.seen()["calls"]


def test_bodies_are_asked_for_and_read_as_they_are(instances, connect: Connect, loop: EventLoopThread) -> None:
    """Packed, a few bytes may stand for gigabytes."""
    (instance,) = instances({})
    client = connect(instance.url)
    loop.run(client.health())
    for session in (client._connections.control, client._connections.generating):
        assert session.headers["Accept-Encoding"] == "identity" and session.auto_decompress is False


def test_events_without_tokens_are_no_progress(instances, connect: Connect, loop: EventLoopThread) -> None:
    (instance,) = instances({"stream": True, "pulse": True})
    with pytest.raises(InstanceStalled, match=r"made no token of a request for 0\.5 s, nor of any other"):
        loop.run(connect(instance.url, request_timeout_s=0.5).generate((3,), SAMPLING, "v1-0", "v1", new_partials()))


def test_an_instance_that_needs_weights_says_so(instances, connect: Connect, loop: EventLoopThread) -> None:
    unwell, empty = instances({"health": 503}, {"needs_weights": True})
    with pytest.raises(NeedsWeights, match="a stream broke"):
        loop.run(connect(empty.url).health())
    with pytest.raises(InstanceRefused) as refusal:
        loop.run(connect(unwell.url).health())
    assert not isinstance(refusal.value, NeedsWeights)


def test_a_request_called_off_while_its_tokens_are_being_checked_keeps_none_of_unknown_version(
    instances, connect: Connect, loop: EventLoopThread
) -> None:
    """An instance is given up, and then removed: the second one meets the check that the first one began."""
    (instance,) = instances(
        {"stream": True, "stop_after": 2, "fate": "hang", "boot_id": "same", "versions_at_end": True}
    )
    client, partials = connect(instance.url), new_partials(SAMPLING.model_copy(update={"n": 1, "seed": 1039}))
    checking = asyncio.Event()

    async def never(timeout_s: float) -> HeldWeights:
        checking.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def call_off_twice() -> None:
        client.holding = never  # type: ignore[method-assign]
        task = asyncio.create_task(client.generate((3,), SAMPLING, "v1-0", "v1", partials, boot_id="same"))
        while len(partials[0].token_ids) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await checking.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.run(call_off_twice())
    assert len(partials[0].token_ids) == len(partials[0].spans) == 0


def test_a_client_that_does_not_know_its_server_asks_for_no_tokens(instances, loop: EventLoopThread) -> None:
    (instance,) = instances({})
    connections = Connections(None)
    client = InstanceClient(connections, instance.url, 10.0)
    try:
        with pytest.raises(AssertionError, match="not asked yet what it speaks"):
            loop.run(generate(client))
        loop.run(client.learn_dialect())
        assert len(loop.run(generate(client))) == SAMPLING.n
    finally:
        loop.run(connections.close())


def test_tokens_that_came_before_an_instance_made_no_more_stay(
    instances, connect: Connect, loop: EventLoopThread
) -> None:
    (instance,) = instances({"stream": True, "stop_after": 2, "fate": "hang"})
    partials = new_partials(SAMPLING.model_copy(update={"n": 1, "seed": 1039}))
    with pytest.raises(InstanceStalled, match="made no token of a request for 3 s, nor of any other"):
        loop.run(connect(instance.url, request_timeout_s=3.0).generate((3,), SAMPLING, "v1-0", "v1", partials))
    assert len(partials[0].token_ids) == 2


def test_health_is_heard_while_requests_take_every_connection(
    instances, connect: Connect, loop: EventLoopThread
) -> None:
    (instance,) = instances({"slow_token": 9})
    client = connect(instance.url)

    async def limit() -> None:
        client._connections.generating.connector._limit = 2

    loop.run(limit())
    busy = [loop.submit(client.generate((9,), SAMPLING, f"v1-{i}", "v1", new_partials())) for i in range(4)]
    while len(instance.seen()["requests"]) < 2:
        time.sleep(0.01)
    assert loop.run(client.health(60.0)) is not None
    assert not any(request.done() for request in busy)
    for request in busy:
        request.cancel()


@pytest.mark.parametrize(
    ("server", "owner", "dialect"),
    [("0.32.0", "async-rl", EMBEDDED), ("0.32.0", "vllm", VLLM), ("0.23.0", "vllm", VLLM_WITHOUT_VERSIONS)],
)
def test_the_dialect_follows_from_what_a_server_says(
    instances, connect: Connect, loop: EventLoopThread, server: str, owner: str, dialect: object
) -> None:
    (instance,) = instances({"server": server, "owner": owner})
    client = connect(instance.url)
    loop.run(client.learn_dialect())
    assert client.dialect == dialect


def test_an_instance_that_another_run_has_is_no_server_that_lacks_a_method(
    instances, connect: Connect, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    (instance,) = instances({})
    client = connect(instance.url)
    status = 404

    async def refuse(*_: object) -> NoReturn:
        raise InstanceRefused("no", status)

    monkeypatch.setattr(client, "_call_workers", refuse)
    assert loop.run(client.nccl_versions(1.0)) == []
    status = 409
    with pytest.raises(InstanceRefused, match="no"):
        loop.run(client.nccl_versions(1.0))
