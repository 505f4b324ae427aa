"""From a row's prompt to text: chat messages through the tokenizer's chat template, or text as it is."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.columns import SOURCE
from async_rl.rollouts.data.part import SourcePart, parts_of
from async_rl.rollouts.data.row import Row, is_unicode, text_of

ASSISTANT = "assistant"

CLOCK = "strftime_now"
FAILING = "raise_exception"
"""Functions that transformers has for templates."""


class Message(TypedDict):
    """The required field of every chat message; the chat template handles any others."""

    role: str


CONVERSATION = TypeAdapter(Annotated[list[Message], Field(min_length=1)])


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts and responses need."""

    chat_template: Any

    def __len__(self) -> int: ...

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, return_special_tokens_mask: bool = False
    ) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self,
        conversation: list[Any],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> list[str]: ...

    def batch_decode(self, sequences: list[Any], *, skip_special_tokens: bool) -> list[str]: ...


def conversation_of(row: Mapping[str, Any], config: PromptsSection) -> list[dict[str, Any]] | None:
    """The chat messages of a row's prompt, or None where prompts are plain text."""
    if not config.chat_template:
        return None
    parts = parts_of(config)
    part = parts[0] if config.source is not None else next(part for part in parts if part.name == row[SOURCE])
    return _conversation(row[part.prompt_name], part)


def render(rows: Sequence[Row], part: SourcePart, tokenizer: Tokenizer) -> list[str]:
    """The text of the prompt of each row; the rows are renderable.

    A conversation that ends with the assistant is left open there, to be continued: its text is the response's
    beginning (prefill), which the response does not have. After any other message the assistant's turn is opened.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    values = [row[part.prompt_name] for row in rows]
    if not part.chat_template:
        return values
    if tokenizer.chat_template is None:
        raise ConfigError("the tokenizer has no chat template: set prompts.chat_template = false")
    conversations = [_conversation(value, part) for value in values]
    texts = [""] * len(values)
    for is_continued in (False, True):
        places = [i for i, messages in enumerate(conversations) if _is_begun(messages) == is_continued]
        if places:
            rendered = tokenizer.apply_chat_template(
                [conversations[i] for i in places],
                tokenize=False,
                add_generation_prompt=not is_continued,
                **({"continue_final_message": True} if is_continued else {}),
                **part.template_arguments,
            )
            for i, text in zip(places, rendered, strict=True):
                texts[i] = text
    return texts


def tokenize(texts: Sequence[str], part: SourcePart, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each text. A plain prompt begins as the tokenizer begins a text (BOS), and is not ended."""
    if part.chat_template:
        # A chat template adds the special tokens itself.
        return list(tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    encoded = tokenizer(list(texts), add_special_tokens=True, return_special_tokens_mask=True)
    return [
        token_ids[: len(mask) - next((i for i, is_added in enumerate(reversed(mask)) if not is_added), 0)]
        for token_ids, mask in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    ]


def identity_of(row: Row, part: SourcePart) -> bytes:
    """What is the same for rows with the same prompt, however it is rendered."""
    value = row[part.prompt_name]
    if part.chat_template and isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return json.dumps(value, sort_keys=True, default=repr).encode()


def asks_the_clock(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> bool:
    """Whether the chat template renders the same conversation otherwise on another day."""
    templates = tokenizer.chat_template
    # By their names, where there is another one for conversations with tools.
    each = templates.values() if isinstance(templates, Mapping) else [templates or ""]
    return any(_asks_the_clock(template, tokenizer, arguments) for template in each)


def _asks_the_clock(template: str, tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> bool:
    if CLOCK not in template:
        return False
    try:
        # It may have a variable for the date, and ask only without.
        tokenizer.apply_chat_template(
            [[{"role": "user", "content": "x"}]],
            tokenize=False,
            add_generation_prompt=True,
            chat_template=template.replace(CLOCK, FAILING),
            **arguments,
        )
    except Exception:
        return True
    return False


def require_place_for_system_prompt(part: SourcePart) -> None:
    """Checks that a system prompt can be rendered; raises a ConfigError if not."""
    if part.system_prompt is not None and not part.chat_template:
        raise ConfigError("prompts.system_prompt is set, but prompts.chat_template = false leaves no place for it")


def require_renderable(row: Row, number: int, part: SourcePart) -> None:
    """Checks that a row's prompt has the configured form: text or, with a chat template, also messages.

    Raises:
        ConfigError: it has not; names the row.
    """
    column = part.columns.get("prompt", part.prompt_name)
    place = f"prompts.source {part.source!r}, row {number}"
    value = row[part.prompt_name]
    if isinstance(value, str):
        require_unicode(value, number, part)
        return
    if not part.chat_template:
        raise ConfigError(
            f"{place}: column {column!r} is {type(value).__name__}, expected text; "
            "chat messages need prompts.chat_template = true"
        )
    try:
        CONVERSATION.validate_python(value, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = "".join(f"[{part!r}]" for part in fault["loc"])
        raise ConfigError(
            f"{place}: column {column!r} is {value!r:.80}, expected text or a list of chat messages with a "
            f"role: correct {column}{where} ({fault['msg']}), or set prompts.columns"
        ) from error
    for i, message in enumerate(value):
        content = message.get("content")
        # What only calls tools says nothing.
        if text_of(content) is None and not (content is None and message["role"] == ASSISTANT):
            raise ConfigError(
                f"{place}: column {column!r} has a message whose content is {content!r:.80}, expected text or a list "
                f"of parts of text: correct {column}[{i}]['content'], or set prompts.columns"
            )
    if value[-1]["role"] == ASSISTANT and not (_is_begun(value) or value[-1].get("content") == ""):
        raise ConfigError(
            f"{place}: column {column!r} ends with a message of the assistant without text, which cannot be "
            "continued: leave that message out, or end with a message of another role"
        )


def require_unicode(prompt: str, number: int, part: SourcePart) -> None:
    """Checks that a row's prompt can be encoded.

    Raises:
        ConfigError: it cannot; names the row.
    """
    if not is_unicode(prompt):
        raise ConfigError(
            f"prompts.source {part.source!r}, row {number}: its prompt has half of a letter (a lone surrogate, "
            'such as "\\ud800"), which is no text: correct it'
        )


def _conversation(value: Any, part: SourcePart) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": part.system_prompt}] if part.system_prompt is not None else []
    if isinstance(value, str):
        return [*system, {"role": "user", "content": value}]
    if value[-1]["role"] == ASSISTANT and value[-1].get("content") == "":
        # Nothing was said yet.
        value = value[:-1]
    # Templates of text write a list as Python does.
    value = [{**each, "content": text_of(each["content"])} if each.get("content") else each for each in value]
    return value if value and value[0]["role"] == "system" else [*system, *value]


def _is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the assistant has begun to say something."""
    return bool(messages) and messages[-1]["role"] == ASSISTANT and bool(messages[-1].get("content"))
