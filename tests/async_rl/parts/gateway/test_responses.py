"""The gateway's Responses API as the openai SDK sees it, and what is trained of it."""

import itertools
import json
import logging
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from async_rl.parts.gateway.answer import AT_LIMIT, Answer
from async_rl.parts.gateway.responses_answer import response_events, response_object
from async_rl.parts.gateway.responses_request import read_responses_request
from tests.support.gateway_rig import Rollout, calculator

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"type": "function", "name": "add", "description": "a + b", "parameters": PARAMETERS, "strict": True}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def post(rollout: Rollout, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{rollout.access.base_url}/responses", content=content, timeout=30, **options)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop_is_one_sequence_with_the_tokens_that_were_sampled(rigs, streamed: bool) -> None:
    rig = rigs(calculator)
    rollout = rig.open()

    def ask(items: list[Any]) -> Response:
        options: Any = {"model": "any", "instructions": "Use the tool.", "input": items, "tools": [ADD]}
        if not streamed:
            return rollout.client().responses.create(**options)
        with rollout.client().responses.stream(**options) as stream:
            return stream.get_final_response()

    items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    first = ask(items)
    message, call = first.output
    assert (message.type, message.content[0].text) == ("message", "let me see") and first.output_text == "let me see"
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1, "b": 2})
    items += [item.to_dict() for item in first.output]
    items += [{"type": "reasoning", "id": "rs_1", "summary": []}]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    second = ask(items)
    assert (second.output_text, second.status) == ("it is 3", "completed")
    assert second.usage is not None and second.usage.output_tokens == len("it is 3") + 1
    rollout.end_calculation()


def test_a_conversation_is_the_same_one_by_either_api(rigs) -> None:
    rig = rigs(calculator)
    chat, responses = rig.open(), rig.open()
    function = {name: value for name, value in ADD.items() if name != "type"}
    said = (
        chat.client()
        .chat.completions.create(
            model="m",
            messages=[{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}],
            tools=[{"type": "function", "function": function}],
        )
        .choices[0]
        .message
    )
    answer = responses.client().responses.create(model="m", instructions="Add.", input="1 + 2?", tools=[ADD])
    assert rig.policy.requests[0] == rig.policy.requests[1]
    assert answer.output_text == said.content and answer.output[1].call_id == said.tool_calls[0].id
    call, output = answer.output[1].to_dict(), {"type": "function_call_output", "call_id": said.tool_calls[0].id}
    more = chat.client().responses.create(
        model="m",
        instructions="Add.",
        input=[
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": said.content},
            call,
            {**output, "output": [{"type": "input_text", "text": "3"}]},
        ],
        tools=[ADD],
    )
    assert more.output_text == "it is 3" and len(chat.end().responses) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_answered_has_all_that_openais_types_demand(rigs, streamed: bool) -> None:
    rollout = rigs(calculator).open()
    body = {"input": "1 + 2?", "tools": [ADD], "stream": streamed, "include": ["message.output_text.logprobs"]}
    answer = post(rollout, body)
    if not streamed:
        whole = Response.model_validate_json(answer.content)
    else:
        frames = [frame.split("\n") for frame in answer.text.removesuffix("\n\n").split("\n\n")]
        events = [EVENT.validate_json(data.removeprefix("data: ")) for _, data in frames]
        assert [event.type for event in events] == [name.removeprefix("event: ") for name, _ in frames]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [kind for kind, _ in itertools.groupby(event.type.removeprefix("response.") for event in events)]
        begin, text = ["created", "in_progress"], ["content_part.added", "output_text.delta", "output_text.done"]
        arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
        added, done = "output_item.added", "output_item.done"
        assert kinds == [*begin, added, *text, "content_part.done", done, added, *arguments, done, "completed"]
        whole = events[-1].response
    (part,) = whole.output[0].content
    assert len(part.logprobs) == whole.usage.output_tokens and part.logprobs[0].bytes == [ord("l")]
    assert rollout.num_turns == 1


def test_what_the_policy_thought_is_an_item_of_its_own() -> None:
    message = {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}
    answer, request = Answer(message, "stop", (1,), (2,), (-0.1,)), read_responses_request(b'{"input": "?"}')
    thought, said = Response.model_validate(response_object(answer, request, lambda ids: ["3"])).output
    assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", "1 + 2", "3")
    data = [event.split(b"data: ")[1] for event in response_events(answer, request, lambda ids: ["3"])]
    events = [EVENT.validate_json(event) for event in data]
    assert [event.delta for event in events if event.type.endswith(".delta")] == ["1 + 2", "3"]
    assert {event.item_id for event in events if event.type.startswith("response.reasoning_text")} == {thought.id}


@pytest.mark.parametrize("text", ["", " \n", "say", " say "])
def test_whatever_is_said_there_is_an_item_of_it_to_send_back(rigs, text: str) -> None:
    rollout = rigs(lambda context, seed: text).open()
    items: list[Any] = [{"role": "user", "content": "?"}]
    for _ in range(3):
        answer = rollout.client().responses.create(model="m", input=items)
        items += [*(item.to_dict() for item in answer.output), {"role": "user", "content": "and?"}]
    assert len(rollout.end().responses) == 1


def test_max_output_tokens_makes_an_incomplete_response(rigs) -> None:
    rollout = rigs(lambda context, seed: "abcdef").open()
    cut = rollout.client().responses.create(model="m", input="?", max_output_tokens=2)
    assert (cut.status, cut.output_text, cut.incomplete_details.reason) == ("incomplete", "ab", "max_output_tokens")
    *_, last = rollout.client().responses.create(model="m", input="?", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.output[0].status == "incomplete"


def test_at_a_limit_an_agent_gets_answers_that_say_so_and_then_errors(rigs) -> None:
    rollout = rigs(lambda context, seed: "yes", max_turns=1).open()
    ask = rollout.client(max_retries=0).responses.create
    ask(model="m", input="?")
    for number in range(4):
        if number % 2:
            *_, last = ask(model="m", input="?", stream=True)
            assert (last.type, last.response.output_text) == ("response.completed", AT_LIMIT)
        else:
            answer = ask(model="m", input="?")
            assert (answer.status, answer.output_text) == ("completed", AT_LIMIT)
    with pytest.raises(openai.BadRequestError) as error:
        ask(model="m", input="?")
    assert error.value.code == "rollout_limit_reached"
    assert (rollout.end().status, rollout.num_turns) == ("truncated", 1)


def test_a_conversation_that_does_not_fit_is_refused_like_by_any_server(rigs) -> None:
    rollout = rigs(lambda context, seed: "yes", max_model_len=100).open()
    with pytest.raises(openai.BadRequestError) as error:
        rollout.client().responses.create(model="m", input="x" * 100)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")


def test_a_retry_gets_the_turn_of_the_first_one_but_not_from_the_other_api(rigs) -> None:
    rollout = rigs(lambda context, seed: str(seed)).open()
    body = {"input": "?", "messages": [{"role": "user", "content": "other"}]}
    again = {"x-stainless-retry-count": "1"}
    first = post(rollout, body)
    assert post(rollout, body, headers=again).content == first.content and rollout.num_turns == 1
    url = f"{rollout.access.base_url}/chat/completions"
    assert httpx.post(url, content=json.dumps(body), headers=again, timeout=30).json()["object"] == "chat.completion"
    assert rollout.end().num_turns == 2
    assert post(rollout, body).status_code == 410


def test_what_is_ignored_is_logged_and_what_frameworks_always_send_is_not(rigs, caplog) -> None:
    rollout = rigs(lambda context, seed: "yes").open()
    usual = {"include": [], "store": False, "text": {"format": {"type": "text"}}, "truncation": "disabled"}
    odd = {"include": ["reasoning.encrypted_content"], "temperature": 0.1, "reasoning": {"effort": "low"}, "top_p": 0.5}
    with caplog.at_level(logging.WARNING, logger="async_rl.parts.gateway"):
        for fields in (usual, odd, odd):
            assert (
                post(rollout, {"input": "?", "parallel_tool_calls": True, "metadata": {}, **fields}).status_code == 200
            )
    assert sorted(record.args[0] for record in caplog.records) == ["include", "reasoning", "temperature", "top_p"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [ADD, {"type": "file_search", "vector_store_ids": ["v"]}]}, "tools[1]"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": {"role": "user", "content": "?"}}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "?"}, {"role": "tool", "content": "?"}]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "add"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "3"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": {"a": 1}}]}, "input[0]"),
    ],
)
def test_what_cannot_be_had_is_a_clear_400(rigs, fields: dict[str, Any], param: str) -> None:
    rollout = rigs(lambda context, seed: "yes").open()
    answer = post(rollout, {"input": "?", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert param in error["message"] and any(word in error["message"] for word in ("expected", "send the item"))
    assert rollout.num_turns == 0


def malformed() -> list[bytes]:
    """Every field with a value of every JSON type that it does not take, in requests and in items."""
    values: dict[str, Any] = {"number": 7, "text": "x", "list": [7], "object": {"x": 7}, "true": True, "nested": [[[]]]}
    fits = {
        "input": {"text"},
        "instructions": {"text"},
        "model": {"text"},
        "tools": set(),
        "tool_choice": set(),
        "max_output_tokens": {"number"},
        "include": set(),
        "stream": {"true"},
    }
    item_fits = {"role": set(), "content": {"text"}, "type": set(), "call_id": {"text"}, "name": {"text"}}
    bodies = [
        {"input": "?", field: value}
        for field, taken in fits.items()
        for kind, value in values.items()
        if kind not in taken
    ]
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    for field, taken in {**item_fits, "arguments": {"text"}}.items():
        item = {"role": "user", "content": "?"} if field in ("role", "content", "type") else call
        bodies += [{"input": [{**item, field: value}]} for kind, value in values.items() if kind not in taken]
    bodies += [{"input": [value]} for kind, value in values.items() if kind != "object"]
    raw = [b"", b"{", b"[]", b"null", b"\xff", b'{"input": ' + b"[" * 100_000, b'{"input": "\\ud800"}']
    deep = b'{"input": [{"role": "user", "content": "?", "x": ' + b'{"x":' * 5_000 + b"1" + b"}" * 5_000 + b"}]}"
    return [*(json.dumps(body).encode() for body in bodies), *raw, deep]


def test_malformed_requests_are_400_in_openais_form(rigs) -> None:
    rollout = rigs(lambda context, seed: "yes").open()
    bodies = malformed()
    assert len(bodies) > 80
    with httpx.Client(timeout=30) as connection:
        for body in bodies:
            answer = connection.post(f"{rollout.access.base_url}/responses", content=body)
            assert answer.status_code == 400, (body[:100], answer.text)
            error = answer.json()["error"]
            assert error["message"] and error["type"] == "invalid_request_error" and error["code"]
    assert rollout.num_turns == 0
    assert post(rollout, {"input": "?"}, headers={"Idempotency-Key": b"\xff"}).status_code == 200
