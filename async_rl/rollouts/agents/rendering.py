"""From chat messages to token ids and back: the interface, and the tokenizer's chat template; for `turn_tree`.

Models that the `renderers` package knows are rendered by it (`known_rendering.py`): it renders the new messages of a
turn alone. For any other model the chat template of its tokenizer renders the whole conversation, and a turn is
continued only if that text begins with what was recorded: the text that was rendered before, and what was sampled. What
follows there gets the tokens that it has in the middle of the text: many tokenizers encode the beginning of a text
otherwise.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

from async_rl.errors import ConfigError
from async_rl.method.token_arrays import TokenIds
from async_rl.rollouts.agents.messages import InvalidRequest, Message, ParsedCall, Tool, ToolParser
from async_rl.shared.programs.extras import require_extras
from async_rl.shared.programs.renderer_names import AUTO, TEMPLATE

log = logging.getLogger(__name__)

TOOL_MARKUP = "<tool_call>"
"""In templates of models that write each call as JSON between `<tool_call>` and `</tool_call>`."""

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})

PLAIN_BEGINNINGS = ("x", "\n", "")
"""Texts to encode after where no token border is: a line break follows a letter, a word follows a line break."""


class Renderer(Protocol):
    """Keeps nothing between calls: a thread renders long messages while another one renders short ones."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """They end what the policy says."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> TokenIds:
        """The whole conversation, up to where the policy speaks.

        Raises:
            InvalidRequest: the messages or tools cannot be rendered.
        """
        ...

    def bridge(
        self,
        context: TokenIds,
        sampled: TokenIds,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> tuple[TokenIds, Message] | None:
        """`context`, `sampled` and then the messages `after` those of `before`, which ends with what was sampled.

        Its last message is as the program saw it: without what ended it.

        Returns:
            The tokens up to where the policy speaks next, and the last message of `before` as it has to be in later
            calls; or None if it cannot be had without rendering again what came before.
        """
        ...

    def parse(
        self, context: TokenIds, sampled: TokenIds, tools: Sequence[Tool] | None
    ) -> tuple[dict[str, Any], list[ParsedCall]]:
        """What the policy said as a message, and its calls, which are not in the message yet: they lack an id."""
        ...


def make_renderer(
    name: str,
    tokenizer: Any,
    model_path: str,
    end_token_ids: Sequence[int] = (),
    template_arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Renderer:
    """The renderer called `name`: auto, template, or one of the `renderers` package.

    Args:
        end_token_ids: end what the policy says, besides those that the renderer knows.
        template_arguments: of the chat template, which renders alone where there are some.

    Raises:
        ConfigError: no such renderer, or it does not fit the tokenizer, or the package is not installed, or it takes no
            arguments of a template.
    """
    if template_arguments and name not in (AUTO, TEMPLATE):
        raise ConfigError(
            f"prompts.chat_template has arguments, but rollout.options.renderer {name!r} renders without the chat "
            f"template: leave one of them out, or set rollout.options.renderer = {TEMPLATE!r}"
        )
    name = TEMPLATE if template_arguments else name
    # The first call unsets what its file says of padding and cutting; later ones only read, so threads may share it.
    tokenizer([""], add_special_tokens=False)
    if name == TEMPLATE and not _has_tools(tokenizer):
        return TemplateRenderer(tokenizer, end_token_ids, template_arguments)
    require_extras(f"rollout.options.renderer = {name!r}", "agents")
    # Imported here: the package is an extra.
    known = import_module("async_rl.rollouts.agents.known_rendering")
    renderer: Renderer | None = (
        None if name == TEMPLATE else known.make_known_renderer(name, tokenizer, model_path, end_token_ids)
    )
    if renderer is not None:
        return renderer
    if name != TEMPLATE:
        log.info("rollout.options.renderer: %s is rendered by its tokenizer's chat template", model_path)
    parse_tools = known.json_tool_parser(tokenizer) if _has_tools(tokenizer) else None
    return TemplateRenderer(tokenizer, end_token_ids, template_arguments, parse_tools)


class TemplateRenderer:
    """The chat template of any tokenizer; `parse_tools` finds calls in what was sampled."""

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: Sequence[int] = (),
        template_arguments: Mapping[str, Any] = NO_ARGUMENTS,
        parse_tools: ToolParser | None = None,
    ) -> None:
        end = tokenizer.eos_token_id
        self.stop_token_ids = tuple(dict.fromkeys((*(() if end is None else (end,)), *end_token_ids)))
        self._tokenizer = tokenizer
        self._added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._arguments = template_arguments
        self._parse_tools = parse_tools

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> TokenIds:
        return self._encode(self._text(messages, tools))

    def bridge(
        self,
        context: TokenIds,
        sampled: TokenIds,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[Tool] | None,
    ) -> tuple[TokenIds, Message] | None:
        earlier = self._text(before[:-1], tools)
        beginnings = [earlier + text for text in self._sampled_texts(context, sampled)]
        for said in self._as_sampled(sampled, before[-1]):
            text = self._text([*before[:-1], said, *after], tools)
            for beginning in beginnings:
                if text.startswith(beginning):
                    recorded = context + sampled
                    return recorded + self._encode_after(recorded, beginning, text[len(beginning) :]), said
        return None

    def parse(
        self, context: TokenIds, sampled: TokenIds, tools: Sequence[Tool] | None
    ) -> tuple[dict[str, Any], list[ParsedCall]]:
        said: Sequence[int] = self._without_end(sampled)
        calls: list[ParsedCall] = []
        if self._parse_tools is not None:
            said, calls = self._parse_tools(said)
        return {"role": "assistant", "content": self._decode(said)}, calls

    def _sampled_texts(self, context: TokenIds, sampled: TokenIds) -> tuple[str, str]:
        """The sampled text with the space at its beginning, which decoders drop at that of a text, and without."""
        last = context[-1:]
        return self._decode(last + sampled).removeprefix(self._decode(last)), self._decode(sampled)

    def _as_sampled(self, sampled: TokenIds, shown: Message) -> Iterator[Message]:
        """The message `shown` to the program, and then as a template may need it to write again what was sampled."""
        yield shown
        # Calls are written by the template, while the sampled text has them, too.
        if "tool_calls" not in shown:
            # With the text that stopped it, and with an end token that is not the template's.
            yield {**shown, "content": self._decode(self._without_end(sampled))}
            yield {**shown, "content": self._decode(sampled)}

    def _without_end(self, sampled: TokenIds) -> TokenIds:
        return sampled[:-1] if sampled and sampled[-1] in self.stop_token_ids else sampled

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
        if self._tokenizer.chat_template is None:
            raise InvalidRequest(
                "the tokenizer has no chat template: generate from token_ids, or name the model's "
                "rollout.options.renderer"
            )
        plain = [_with_objects(message) for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                plain,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **self._arguments,
            )
        except Exception as error:
            # The template is a program of its own; it raises whatever it likes.
            raise InvalidRequest(f"the chat template does not render these messages: {error}") from error
        return text

    def _encode(self, text: str) -> TokenIds:
        return TokenIds(self._tokenizer([text], add_special_tokens=False)["input_ids"][0])

    def _encode_after(self, recorded: TokenIds, beginning: str, text: str) -> TokenIds:
        """The tokens that `text` has after `beginning`, the text of `recorded`.

        From an added token on, text is encoded independently of what is before it: the last one is far enough to look
        back.
        """
        last = next((self._added[token] for token in reversed(recorded) if token in self._added), "")
        near = beginning[max(beginning.rfind(last), 0) :] if last else beginning
        for before in (near, *PLAIN_BEGINNINGS):
            head, whole = self._encode(before), self._encode(before + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        raise AssertionError("an empty beginning has no tokens")

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def _has_tools(tokenizer: Any) -> bool:
    return TOOL_MARKUP in str(tokenizer.chat_template)


def _with_objects(message: Message) -> Message:
    """The message with its calls' arguments as objects, which templates write in their own spacing."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
