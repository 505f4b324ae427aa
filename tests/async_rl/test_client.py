import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from async_rl.client import Connections, InstanceClient
from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable, StaleWeights
from async_rl.event_loop import EventLoopThread
from async_rl.protocol import SamplingParams

Connect = Callable[..., InstanceClient]
SAMPLING = SamplingParams(n=3, max_tokens=8, seed=1024, logprobs=0)


@pytest.fixture
def connect(loop: EventLoopThread) -> Iterator[Connect]:
    opened: list[Connections] = []

    def connect(url: str, *, request_timeout_s: float = 10.0, token: str | None = None) -> InstanceClient:
        opened.append(Connections(token))
        return InstanceClient(opened[-1], url, request_timeout_s)

    yield connect
    for connections in opened:
        loop.run(connections.close())


def generate(client: InstanceClient, sampling: SamplingParams = SAMPLING) -> Awaitable:
    return client.generate((3, 4, 5), sampling, "v1-0", "v1")


def test_generate_returns_n_responses_with_a_logprob_and_a_version_for_every_token(
    instances, connect: Connect, loop: EventLoopThread
) -> None:
    (instance,) = instances({})
    responses = loop.run(generate(connect(instance.url + "/")))
    assert len(responses) == 3
    for response in responses:
        assert len(response.token_ids) == len(response.logprobs) >= 1
        assert response.weight_spans[-1].end == len(response.token_ids)
        assert (response.instance, response.finish_reason) == (instance.url, "stop")
    (request,) = instance.seen()["requests"]
    assert (request["token_ids"], request["request_id"]) == ([3, 4, 5], "v1-0")
    assert request["sampling_params"] == SAMPLING.model_dump()
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


def test_tokens_of_another_version_are_stale(instances, connect: Connect, loop: EventLoopThread) -> None:
    (instance,) = instances({"stale": "v0"})
    with pytest.raises(StaleWeights, match=f"{instance.url} sampled from weight version 'v0.*asked for 'v1'"):
        loop.run(generate(connect(instance.url)))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"short": True}, "tokens with .* log-probs, expected one for each"),
        ({"abort_at": 0}, "finish_reason is 'abort', expected 'stop' or 'length'"),
    ],
)
def test_answer_that_is_no_whole_sample_is_an_error(
    instances, connect: Connect, loop: EventLoopThread, script: dict, message: str
) -> None:
    (instance,) = instances(script)
    with pytest.raises(InstanceError, match=message):
        loop.run(generate(connect(instance.url)))


def test_refusal_carries_status_and_the_servers_words(instances, connect: Connect, loop: EventLoopThread) -> None:
    (instance,) = instances({"token": "secret"})
    with pytest.raises(InstanceRefused, match="with 400: prompt and max_tokens are longer than the model") as caught:
        loop.run(generate(connect(instance.url, token="secret"), SamplingParams(max_tokens=100, seed=0)))
    assert caught.value.status == 400
    with pytest.raises(InstanceRefused, match="with 401: a bearer token is needed"):
        loop.run(connect(instance.url).health())


def test_silence_and_a_closed_port_are_unreachable(instances, connect: Connect, loop: EventLoopThread) -> None:
    (instance,) = instances({"hang_at": 0})
    with pytest.raises(InstanceUnreachable, match="did not answer POST /inference/v1/generate"):
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
