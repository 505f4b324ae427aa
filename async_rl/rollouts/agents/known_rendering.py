"""Models that the `renderers` package knows: it renders the messages of a new turn alone; for `rendering`.

Imported only where the extra `agents` is installed.
"""

import json
from collections.abc import Sequence
from typing import Any

from renderers import create_renderer
from renderers.base import MODEL_RENDERER_MAP, ParsedToolCall, ToolCallParseStatus
from renderers.configs import config_from_name
from renderers.parsers import Qwen3ToolParser

from async_rl.errors import ConfigError
from async_rl.method.token_arrays import TokenIds
from async_rl.rollouts.agents.messages import InvalidRequest, Message, ParsedCall, Tool, ToolParser
from async_rl.shared.programs.renderer_names import AUTO, require_renderer


def make_known_renderer(
    name: str, tokenizer: Any, model_path: str, end_token_ids: Sequence[int] = ()
) -> "KnownRenderer | None":
    """The package's renderer called `name`; for "auto" that of the model, or None for a model it does not know.

    Raises:
        ConfigError: no such renderer, or it does not fit the tokenizer.
    """
    if name == AUTO:
        # The exact hub name, as the package wants it: the template of a fine-tuned model may be another one.
        found = MODEL_RENDERER_MAP.get(model_path)
        return None if found is None else make_known_renderer(found, tokenizer, model_path, end_token_ids)
    require_renderer(name)
    config: Any = config_from_name(name)
    try:
        # A template that drops old thinking would make a branch of every turn after a user's message.
        renderer = create_renderer(tokenizer, type(config)(thinking_retention="all"))
        return KnownRenderer(renderer, tokenizer, end_token_ids)
    except Exception as error:
        raise ConfigError(
            f"rollout.options.renderer {name!r} does not fit the tokenizer of {model_path}: {error}"
        ) from error


class KnownRenderer:
    """Implements `Renderer` with one of the package's."""

    def __init__(self, renderer: Any, tokenizer: Any, end_token_ids: Sequence[int]) -> None:
        known = tuple(renderer.get_stop_token_ids())
        self.stop_token_ids = tuple(dict.fromkeys((*known, *end_token_ids)))
        self._unknown_ends = frozenset(self.stop_token_ids) - frozenset(known)
        self._renderer = renderer
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> TokenIds:
        try:
            return TokenIds(self._renderer.render_ids(list(messages), tools=_list(tools), add_generation_prompt=True))
        except Exception as error:
            # It trusts its input, and raises whatever follows.
            raise InvalidRequest(f"the renderer does not render these messages: {error!r}") from error

    def bridge(
        self,
        context: TokenIds,
        sampled: TokenIds,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> tuple[TokenIds, Message] | None:
        try:
            bridged = self._renderer.bridge_to_next_turn(list(context), list(sampled), list(after), tools=_list(tools))
        except Exception as error:
            raise InvalidRequest(f"the renderer does not render these messages: {error!r}") from error
        return None if bridged is None else (TokenIds(bridged.token_ids), before[-1])

    def parse(
        self, context: TokenIds, sampled: TokenIds, tools: Sequence[Tool] | None
    ) -> tuple[dict[str, Any], list[ParsedCall]]:
        said = sampled[:-1] if sampled and sampled[-1] in self._unknown_ends else sampled
        parsed = self._renderer.parse_response(list(said), tools=_list(tools), prompt_ids=list(context))
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls, broken = _calls(parsed.tool_calls, said, self._tokenizer)
        message["content"] = "\n".join(filter(None, [parsed.content, *broken]))
        return message, calls


def json_tool_parser(tokenizer: Any) -> ToolParser:
    """Finds calls written as JSON between `<tool_call>` and `</tool_call>`."""
    parser = Qwen3ToolParser(tokenizer)

    def parse(token_ids: Sequence[int]) -> tuple[list[int], list[ParsedCall]]:
        rest, found = parser.extract(list(token_ids))
        calls, broken = _calls(found, token_ids, tokenizer)
        # The text is shown as it was sampled where a call in it cannot be made.
        return (list(token_ids), []) if broken else (rest, calls)

    return parse


def _calls(
    attempts: Sequence[ParsedToolCall], token_ids: Sequence[int], tokenizer: Any
) -> tuple[list[ParsedCall], list[str]]:
    """The calls that can be made, and the text of those that cannot."""
    calls: list[ParsedCall] = []
    broken: list[str] = []
    for attempt in attempts:
        if attempt.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL) and attempt.name:
            arguments = attempt.arguments
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            calls.append(ParsedCall(attempt.name, text, attempt.id))
        elif attempt.token_span is not None:
            broken.append(tokenizer.decode(list(token_ids[slice(*attempt.token_span)]), skip_special_tokens=False))
        else:
            broken.append(attempt.raw)
    return calls, broken


def _list(tools: Sequence[Tool] | None) -> list[Tool] | None:
    return list(tools) if tools else None
