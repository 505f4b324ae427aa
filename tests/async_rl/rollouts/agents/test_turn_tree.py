"""The turn_tree against a plain account of generated histories: what was sampled is labelled once, and as it was."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest

from async_rl.method.token_arrays import ExpertIds
from async_rl.method.types import Response, WeightSpan
from async_rl.rollouts.agents.known_rendering import make_known_renderer
from async_rl.rollouts.agents.messages import InvalidRequest, normalized
from async_rl.rollouts.agents.rendering import Renderer, TemplateRenderer, make_renderer
from async_rl.rollouts.agents.turn_tree import Conversation, TurnContext, TurnTree
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.groups import make_response

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]


@pytest.fixture(params=["qwen3", "template"])
def renderer(request: pytest.FixtureRequest, tokenizer: Any) -> Renderer:
    return make_renderer(request.param, tokenizer, "a model")


def response(token_ids: Sequence[int], version: str = "v1", context: Sequence[int] | None = None) -> Response:
    """The log-prob of each token tells which token it is of; with its context, so do both routes of each row, as its
    instance has them."""
    made = make_response(token_ids, logprobs=[-float(token) for token in token_ids], version=version)
    if context is None:
        return made
    rows = [
        ExpertIds([each for token in tokens for each in (token, token + 1)]) for tokens in (context, token_ids[:-1])
    ]
    return replace(made, prompt_routes=rows[0], routes=rows[1])


class Account:
    """What a history must become, told in the plainest way: a list of (context, sampled) for all turns."""

    def __init__(self) -> None:
        self.turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def check(self, responses: Sequence[Response], prompt_ids: tuple[int, ...]) -> None:
        wholes = [context + sampled for context, sampled in self.turns]
        ends = {w for w in wholes if not any(other[: len(w)] == w for other in (c for c, _ in self.turns))}
        got: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        found = set()
        for each in responses:
            base = prompt_ids if each.prompt_ids is None else each.prompt_ids
            whole = base + each.token_ids
            found.add(whole)
            sampled = list(each.sampled)
            assert len(sampled) == len(each.logprobs) == each.num_sampled > 0
            assert all(logprob == -each.token_ids[i] for i, logprob in zip(sampled, each.logprobs, strict=True))
            assert sampled[-1] == len(each.token_ids) - 1, "nothing after the last sampled token"
            assert each.weight_versions == {"v1"}
            edges = [edge for bounds in each.observed for edge in bounds]
            assert edges == sorted(set(edges)) and all(a < b for a, b in each.observed), "ascending and apart"
            # Which turns its labelled tokens are: sampled runs, in which several turns may meet.
            left = set(sampled)
            for context, said in self.turns:
                place = range(len(context) - len(base), len(context) - len(base) + len(said))
                if whole[: len(context) + len(said)] == context + said and left.issuperset(place):
                    got.append((context, said))
                    left -= set(place)
            assert not left, "labelled tokens that nobody sampled"
        assert found == ends
        assert sorted(got) == sorted(self.turns), "each turn once"


def test_any_tree_of_token_turns_is_labelled_once_and_exactly() -> None:
    chance = random.Random(0)
    for _ in range(300):
        turn_tree, account = TurnTree(None), Account()  # type: ignore[arg-type]
        numbers = count(100)
        prompt = tuple(chance.randrange(5) for _ in range(chance.randrange(1, 4)))
        contexts = [prompt, prompt, (*prompt, 7), (3,)]
        for _ in range(chance.randrange(1, 12)):
            context = chance.choice(contexts)
            # Unique tokens, so that a turn can be told from any other.
            sampled = tuple(next(numbers) for _ in range(chance.randrange(1, 4)))
            turn_tree.add(TurnContext(context), response(sampled, context=context))
            account.turns.append((context, sampled))
            whole = context + sampled
            contexts += [whole, (*whole, chance.randrange(5)), (*whole, 1, 2), whole[:-1]]
        responses = turn_tree.responses(prompt)
        account.check(responses, prompt)
        for each in responses:
            tokens = prompt if each.prompt_ids is None else each.prompt_ids
            for rows, routes in ((tokens, each.prompt_routes), (each.token_ids[:-1], each.routes)):
                assert routes is not None and routes.tolist() == [x for token in rows for x in (token, token + 1)]


def test_without_reported_routes_there_are_none() -> None:
    turn_tree = TurnTree(None)  # type: ignore[arg-type]
    turn_tree.add(TurnContext((1, 2)), response((3,)))
    (whole,) = turn_tree.responses((1,))
    assert whole.routes is None and whole.prompt_routes is None


def test_the_order_in_which_turns_arrive_does_not_matter() -> None:
    chance = random.Random(1)
    for _ in range(50):
        turns = [((1, 2), (10 + i,)) for i in range(4)]
        turns += [((1, 2, 10, 5), (20,)), ((1, 2, 11), (21, 22)), ((9,), (23,))]
        told = set()
        for _ in range(3):
            turn_tree = TurnTree(None)  # type: ignore[arg-type]
            chance.shuffle(turns)
            # A turn is recorded after the one that it continues.
            for context, sampled in sorted(turns, key=lambda turn: len(turn[0])):
                turn_tree.add(TurnContext(context), response(sampled))
            told.add(turn_tree.responses((1, 2)))
        assert len(told) == 1


def test_responses_follow_the_groups_prompt_where_they_begin_with_it() -> None:
    turn_tree = TurnTree(None)  # type: ignore[arg-type]
    for context in [(1, 2), (1, 2, 3), (4, 5)]:
        turn_tree.add(TurnContext(context), response((100 + len(context),)))
    longer, plain, other = turn_tree.responses((1, 2))
    assert (plain.prompt_ids, plain.token_ids, plain.observed) == (None, (102,), ())
    assert (longer.prompt_ids, longer.token_ids, longer.observed) == (None, (3, 103), ((0, 1),))
    assert (other.prompt_ids, other.token_ids, other.observed) == ((4, 5), (102,), ())


def test_spans_of_several_versions_cover_sampled_tokens_only() -> None:
    turn_tree = TurnTree(None)  # type: ignore[arg-type]
    turn_tree.add(TurnContext((1,)), response((2, 3)))
    turn_tree.add(TurnContext((1, 2, 3, 4, 5)), response((6,)))
    turn_tree.add(TurnContext((1, 2, 3, 4, 5, 6)), response((7,), version="v2"))
    (whole,) = turn_tree.responses((1,))
    assert whole.weight_spans == (WeightSpan("v1", 0, 3), WeightSpan("v2", 3, 4))
    assert whole.observed == ((2, 4),) and whole.weight_versions == {"v1", "v2"}


def say(
    turn_tree: TurnTree, renderer: Renderer, tokenizer: Any, messages: list[Any], text: str, tools: Any = None
) -> Any:
    """One turn in which the policy says `text`; returns its message."""
    request = turn_tree.request(Conversation.of(messages, tools), tools)
    sampled = tuple(tokenizer([text + "<|im_end|>"], add_special_tokens=False)["input_ids"][0])
    message, calls = renderer.parse(request.context, sampled, tools)
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(calls)
        ]
    turn_tree.add(request, response(sampled), message)
    return message


def test_random_conversations_keep_their_tokens(renderer: Renderer, tokenizer: Any) -> None:
    chance = random.Random(2)
    for _ in range(40):
        turn_tree, account = TurnTree(renderer), Account()
        histories: list[list[Any]] = [[{"role": "user", "content": "hi"}]]
        for number in range(chance.randrange(1, 8)):
            messages = list(chance.choice(histories))
            text = f"Number {number}" + chance.choice(["", " ", ".", "\n"])
            message = say(turn_tree, renderer, tokenizer, messages, text)
            node = turn_tree.turns[-1]
            before = tuple(chain.from_iterable(n.own for n in node.path))
            account.turns.append((before[: -len(node.response.token_ids)], node.response.token_ids))
            user = {"role": "user", "content": chance.choice(["go on", "why"])}
            histories.append([*messages, message, user])
            # As clients send it back: other spacing, nulls, no reasoning.
            trimmed = {"role": "assistant", "content": message["content"].strip(), "tool_calls": None}
            histories.append([*messages, trimmed, user])
        account.check(turn_tree.responses((5,)), (5,))


def test_a_history_that_only_grows_is_one_response(renderer: Renderer, tokenizer: Any) -> None:
    turn_tree = TurnTree(renderer)
    messages: list[Any] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    for number in range(5):
        message = say(turn_tree, renderer, tokenizer, messages, f"word {number}")
        messages += [
            {**message, "content": f" {message['content']}", "refusal": None},
            {"role": "user", "content": "on"},
        ]
    (whole,) = turn_tree.responses(())
    assert tokenizer.decode([*(whole.prompt_ids or ()), *whole.token_ids]).count("<|im_start|>assistant") == 5
    assert len(whole.observed) == (4 if whole.prompt_ids else 5)


def test_a_changed_history_is_a_branch_and_its_first_part_is_labelled_once(renderer: Renderer, tokenizer: Any) -> None:
    turn_tree = TurnTree(renderer)
    first: list[Any] = [{"role": "user", "content": "hi"}]
    message = say(turn_tree, renderer, tokenizer, first, "one")
    on = [*first, message, {"role": "user", "content": "a"}]
    say(turn_tree, renderer, tokenizer, on, "two")
    say(turn_tree, renderer, tokenizer, [*first, message, {"role": "user", "content": "b"}], "three")
    say(turn_tree, renderer, tokenizer, [{"role": "user", "content": "other"}], "four")
    responses = turn_tree.responses(())
    assert len(responses) == 3
    assert sum(response.num_sampled for response in responses) == len("onetwothreefour") + 4


def test_old_thinking_stays_with_a_known_renderer(tokenizer: Any) -> None:
    renderer = make_renderer("qwen3", tokenizer, "a model")
    turn_tree = TurnTree(renderer)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for number in range(3):
        message = say(turn_tree, renderer, tokenizer, messages, f"<think>\nhm {number}\n</think>\n\nword")
        assert message["reasoning_content"] == f"hm {number}" and message["content"] == "word"
        messages += [{"role": "assistant", "content": "word"}, {"role": "user", "content": "go on"}]
    (whole,) = turn_tree.responses(())
    assert "hm 0" in tokenizer.decode(whole.token_ids)


def test_calls_of_tools_are_parsed_and_compared_by_what_they_say(tokenizer: Any) -> None:
    for name in ("qwen3", "template"):
        renderer = make_renderer(name, tokenizer, "a model")
        turn_tree = TurnTree(renderer)
        text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        messages: list[Any] = [{"role": "user", "content": "1 + 2"}]
        message = say(turn_tree, renderer, tokenizer, messages, text, TOOLS)
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "add" and '"a": 1' in call["function"]["arguments"]
        echoed = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}],
        }
        result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "3"}]}
        request = turn_tree.request(Conversation.of([*messages, echoed, result], TOOLS), TOOLS)
        if name == "qwen3":
            assert request.parent is turn_tree.turns[0]
        changed = turn_tree.request(Conversation.of([*messages, echoed, result], []), [])
        assert changed.parent is None, "other tools, another history"


def test_the_policy_may_write_any_number_of_brackets(renderer: Renderer, tokenizer: Any) -> None:
    turn_tree = TurnTree(renderer)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    text = '<tool_call>\n{"name": "add", "arguments": "%s"}\n</tool_call>' % ("[" * 5000)
    message = say(turn_tree, renderer, tokenizer, messages, text, TOOLS)
    request = turn_tree.request(Conversation.of([*messages, message, {"role": "tool", "content": "no"}], TOOLS), TOOLS)
    assert len(request.context) > 5000


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "add", "argu</tool_call>', '<tool_call>{"name": "add"', "<tool_call>[1]</tool_call>"]
)
def test_a_call_that_cannot_be_made_is_shown_as_it_was_said(renderer: Renderer, tokenizer: Any, text: str) -> None:
    turn_tree = TurnTree(renderer)
    message = say(turn_tree, renderer, tokenizer, [{"role": "user", "content": "hi"}], text, TOOLS)
    assert "tool_calls" not in message
    assert text in message["content"]


def test_a_turn_that_ends_at_any_end_token_of_the_model_does_not_show_it(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path)
    tokenizer.add_tokens(["<|other_end|>"], special_tokens=True)
    word, other = tokenizer.convert_tokens_to_ids(["z", "<|other_end|>"])
    for name in ("template", "qwen3"):
        renderer = make_renderer(name, tokenizer, "a model", (other, tokenizer.eos_token_id))
        assert {other, tokenizer.eos_token_id} <= set(renderer.stop_token_ids)
        context = renderer.render([{"role": "user", "content": "hi"}], None)
        for end in ((other,), (tokenizer.eos_token_id,), ()):
            message, calls = renderer.parse(context, (word, *end), None)
            assert (message["content"], calls) == ("z", [])


def test_what_was_sampled_otherwise_than_it_would_be_encoded_is_never_encoded_again(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path)
    tokenizer.add_tokens(["zz"])
    pair, letter = tokenizer.convert_tokens_to_ids(["zz", "z"])
    end = tokenizer.eos_token_id
    for renderer in (TemplateRenderer(tokenizer), make_known_renderer("qwen3", tokenizer, "a model")):
        assert renderer is not None
        turn_tree = TurnTree(renderer)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        request = turn_tree.request(Conversation.of(messages))
        sampled = (letter, letter, end)
        message, _ = renderer.parse(request.context, sampled, None)
        assert message["content"] == "zz"
        turn_tree.add(request, response(sampled), message)
        following = turn_tree.request(Conversation.of([*messages, message, {"role": "user", "content": "zz"}]))
        assert following.context[: len(request.context) + 3] == request.context + sampled
        assert pair in following.context[len(request.context) + 3 :], "the new message is encoded as usual"


def test_a_template_that_rewrites_history_makes_branches_and_never_wrong_tokens(tmp_path: Path) -> None:
    forgets = "{% for m in messages %}{{ m.role }}{% if loop.last %}: {{ m.content }}{% endif %}\n{% endfor %}"
    tokenizer = make_chat_tokenizer(tmp_path, template=forgets)
    renderer = make_renderer("template", tokenizer, "a model")
    turn_tree = TurnTree(renderer)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for number in range(3):
        message = say(turn_tree, renderer, tokenizer, messages, f"word {number}")
        messages += [message, {"role": "user", "content": "on"}]
    assert len(turn_tree.responses(())) == 3


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [None],
        [{"content": "no role"}],
        [{"role": "god", "content": ""}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}],
        [{"role": "assistant", "content": "", "tool_calls": 5}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        normalized(messages)


@pytest.mark.parametrize("tools", [5, ["add"], {"add": 1}])
def test_malformed_tools_are_refused(renderer: Renderer, tools: Any) -> None:
    with pytest.raises(InvalidRequest):
        TurnTree(renderer).request(Conversation.of([{"role": "user", "content": "hi"}], tools), tools)
