"""The gateway as the openai SDK sees it, and what is trained of it."""

import asyncio
import json
import logging
import threading
from typing import Any

import openai
import pytest

from async_rl.parts.gateway.answer import AT_LIMIT
from tests.support.gateway_rig import calculator

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def test_a_tool_loop_of_the_sdk_is_one_sequence_with_the_tokens_that_were_sampled(rigs) -> None:
    rig = rigs(calculator)
    rollout = rig.open()
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    first = rollout.client().chat.completions.create(model="any", messages=messages, tools=[ADD])
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "let me see"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    second = rollout.client().chat.completions.create(model="any", messages=messages, tools=[ADD])
    assert second.choices[0].message.content == "it is 3" and second.choices[0].finish_reason == "stop"
    assert second.usage.completion_tokens == len("it is 3") + 1
    rollout.end_calculation()


def test_a_stream_has_the_deltas_of_openai(rigs) -> None:
    rollout = rigs(calculator).open()
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "tools": [ADD], "logprobs": True}
    chunks = list(
        rollout.client().chat.completions.create(model="any", messages=[{"role": "user", "content": "1?"}], **options)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "let me see"
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.type, call.function.name) == (0, "function", "add")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    tokens = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert len(tokens) == chunks[-1].usage.completion_tokens and tokens[0].token == "l" and tokens[0].bytes == [108]
    assert rollout.end().num_turns == 1


def test_the_accumulated_stream_of_the_sdk_continues_its_turn(rigs) -> None:
    rollout = rigs(calculator).open()
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    with rollout.client().chat.completions.stream(model="any", messages=messages, tools=[ADD]) as stream:
        said = stream.get_final_completion().choices[0].message
    messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}]
    rollout.client().chat.completions.create(model="any", messages=messages, tools=[ADD])
    assert len(rollout.end().responses) == 1


def test_a_changed_history_is_a_branch_and_every_token_trains_once(rigs) -> None:
    rig = rigs(lambda context, seed: "yes")
    rollout = rig.open()
    ask = rollout.client().chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "one"}]
    said = ask(model="m", messages=messages).choices[0].message
    ask(model="m", messages=[*messages, said, {"role": "user", "content": "two"}])
    ask(model="m", messages=[{"role": "user", "content": "a summary"}])
    trajectory = rollout.end()
    assert (len(trajectory.responses), trajectory.num_turns, trajectory.num_tokens) == (2, 3, 3 * 4)


def test_the_key_does_as_api_key_without_a_path_of_its_own(rigs) -> None:
    rollout = rigs(lambda context, seed: "yes").open()
    sdk = rollout.client(base_url=f"{rollout.access.root_url}/v1", api_key=rollout.access.key)
    assert sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}]).choices
    assert [model.id for model in sdk.models.list()] == ["policy"] and sdk.models.retrieve("a/b").id == "a/b"


def test_what_a_client_asks_of_sampling_is_ignored_and_logged_once(rigs, caplog) -> None:
    rig = rigs(lambda context, seed: "yes", temperature=0.7)
    rollout = rig.open()
    with caplog.at_level(logging.WARNING, logger="async_rl.parts.gateway"):
        for seed in (1, 2):
            rollout.client().chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "?"}],
                temperature=0.1,
                seed=seed,
                user="me",
                response_format={"type": "json_object"},
            )
        rollout.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "?"}], temperature=0.7, top_p=1.0
        )
    assert sorted(record.args[0] for record in caplog.records) == ["response_format", "seed", "temperature"]
    assert {sampling.temperature for _, sampling in rig.policy.requests} == {0.7}


@pytest.mark.parametrize(
    "options, param",
    [
        ({"n": 2}, "n"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"max_tokens": 0}, None),
        ({"stop": [""]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": []}, None),
    ],
)
def test_what_cannot_be_had_is_a_clear_400(rigs, options: dict[str, Any], param: str | None) -> None:
    rollout = rigs(lambda context, seed: "yes").open()
    body: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}], **options}
    with pytest.raises(openai.BadRequestError) as error:
        rollout.client().chat.completions.create(**body)
    assert error.value.param == param and "expected" in error.value.message
    assert rollout.num_turns == 0


def test_no_tools_are_offered_where_none_may_be_called(rigs) -> None:
    rig = rigs(lambda context, seed: "yes")
    rig.open().client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "?"}], tools=[ADD], tool_choice="none"
    )
    assert "tools" not in rig.policy.requests[0][0]


def test_max_tokens_and_stop_are_honoured_within_the_limits_of_the_run(rigs) -> None:
    rig = rigs(lambda context, seed: "abcdef", max_response_tokens=8)
    ask = rig.open().client().chat.completions.create
    messages: Any = [{"role": "user", "content": "?"}]
    assert ask(model="m", messages=messages, max_completion_tokens=2).choices[0].finish_reason == "length"
    stopped = ask(model="m", messages=messages, stop="c").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("ab", "stop")
    assert ask(model="m", messages=messages, max_tokens=10_000).usage.completion_tokens == 8 - 2 - 3


def test_at_a_limit_an_agent_gets_answers_that_say_so_and_then_errors(rigs) -> None:
    rollout = rigs(lambda context, seed: "yes", max_turns=1).open()
    ask = rollout.client(max_retries=0).chat.completions.create
    messages: Any = [{"role": "user", "content": "?"}]
    ask(model="m", messages=messages)
    for _ in range(4):
        (choice,) = ask(model="m", messages=messages).choices
        assert (choice.finish_reason, choice.message.content) == ("length", AT_LIMIT)
    with pytest.raises(openai.BadRequestError) as error:
        ask(model="m", messages=messages)
    assert error.value.code == "rollout_limit_reached"
    trajectory = rollout.end()
    assert (trajectory.status, trajectory.num_turns) == ("truncated", 1)


def test_a_conversation_that_does_not_fit_is_refused_like_by_any_server(rigs) -> None:
    rollout = rigs(lambda context, seed: "yes", max_model_len=100).open()
    ask = rollout.client().chat.completions.create
    with pytest.raises(openai.BadRequestError) as error:
        ask(model="m", messages=[{"role": "user", "content": "x" * 100}])
    assert error.value.code == "context_length_exceeded" and "maximum context length" in error.value.message
    assert ask(model="m", messages=[{"role": "user", "content": "a summary"}]).choices[0].message.content == "yes"


def test_after_the_rollout_its_key_is_gone(rigs) -> None:
    rollout = rigs(lambda context, seed: "yes").open()
    messages: Any = [{"role": "user", "content": "?"}]
    rollout.client().chat.completions.create(model="m", messages=messages)
    rollout.end()
    with pytest.raises(openai.APIStatusError) as error:
        rollout.client().chat.completions.create(model="m", messages=messages)
    assert error.value.status_code == 410 and error.value.code == "rollout_ended"
    with pytest.raises(openai.AuthenticationError):
        rollout.client(base_url=f"{rollout.access.root_url}/v1", api_key="guessed").models.list()


def test_retries_of_the_sdk_join_and_train_one_turn(rigs) -> None:
    """The first attempts time out at 1 s; the answer takes longer than two of them."""
    rig = rigs(lambda context, seed: "yes")
    rig.policy.before_answering = lambda: asyncio.sleep(3.0)
    rollout = rig.open()
    sdk = rollout.client(timeout=1.0, max_retries=5)
    assert sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}]).choices
    trajectory = rollout.end()
    assert (len(rig.policy.requests), trajectory.num_turns, len(trajectory.responses)) == (1, 1, 1)


def test_an_answer_that_was_sent_is_sent_again_to_a_retry(rigs) -> None:
    rollout = rigs(lambda context, seed: str(seed)).open()
    ask = rollout.client().chat.completions.with_raw_response.create
    messages: Any = [{"role": "user", "content": "?"}]
    first = ask(model="m", messages=messages)
    again = ask(model="m", messages=messages, extra_headers={"x-stainless-retry-count": "1"})
    assert first.content == again.content and rollout.num_turns == 1
    other = ask(model="m", messages=messages)
    assert other.parse().choices[0].message.content != first.parse().choices[0].message.content
    assert rollout.end().num_turns == 2


def test_what_nobody_waits_for_is_cancelled_and_not_trained(rigs, eventually, monkeypatch) -> None:
    monkeypatch.setattr("async_rl.parts.gateway.exchanges.RETRY_GRACE_S", 0.2)
    rig = rigs(lambda context, seed: "yes")
    rig.policy.before_answering = lambda: asyncio.sleep(60)
    rollout = rig.open()
    with pytest.raises(openai.APITimeoutError):
        rollout.client(timeout=0.2, max_retries=0).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "?"}]
        )
    eventually(lambda: rig.policy.num_cancelled == 1)
    rig.policy.before_answering = lambda: asyncio.sleep(0)
    rollout.client().chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    # The one after the same tokens samples what the cancelled one would have sampled.
    assert rig.policy.requests[0][1].seed == rig.policy.requests[1][1].seed
    assert rollout.end().num_turns == 1


def test_the_end_of_a_rollout_ends_its_requests_with_410(rigs) -> None:
    rig = rigs(lambda context, seed: "yes")
    rollout = rig.open()
    messages: Any = [{"role": "user", "content": "?"}]
    rollout.client().chat.completions.create(model="m", messages=messages)
    asked = threading.Event()

    async def wait() -> None:
        asked.set()
        await asyncio.sleep(60)

    rig.policy.before_answering = wait
    errors: list[openai.APIStatusError] = []

    def ask() -> None:
        try:
            rollout.client().chat.completions.create(model="m", messages=messages)
        except openai.APIStatusError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(60)
    assert rollout.end().num_turns == 1
    thread.join(60)
    assert [error.status_code for error in errors] == [410] and rig.policy.num_cancelled == 1
