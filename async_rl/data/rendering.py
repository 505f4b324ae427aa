"""From a row's prompt to text: chat messages through the tokenizer's chat template, or text as it is."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from async_rl.config.prompts_section import PromptsSection
from async_rl.data.columns import SOURCE
from async_rl.data.part import Part, parts_of
from async_rl.data.row import Row, is_unicode
from async_rl.errors import ConfigError


class Message(TypedDict):
    """The required field of every chat message; the chat template handles any others."""

    role: str


CONVERSATION = TypeAdapter(Annotated[list[Message], Field(min_length=1)])


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts and responses need."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool
    ) -> list[str]: ...

    def batch_decode(self, sequences: list[Any], *, skip_special_tokens: bool) -> list[str]: ...


def conversation_of(row: Mapping[str, Any], config: PromptsSection) -> list[dict[str, Any]] | None:
    """The chat messages of a row's prompt, or None where prompts are plain text."""
    if not config.chat_template:
        return None
    parts = parts_of(config)
    part = parts[0] if config.source is not None else next(part for part in parts if part.name == row[SOURCE])
    return _conversation(row[part.prompt_name], part)


def render(rows: Sequence[Row], part: Part, tokenizer: Tokenizer) -> list[str]:
    """The text of the prompt of each row; the rows are renderable.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    values = [row[part.prompt_name] for row in rows]
    if not part.chat_template:
        return values
    if tokenizer.chat_template is None:
        raise ConfigError("the tokenizer has no chat template: set prompts.chat_template = false")
    conversations = [_conversation(value, part) for value in values]
    return tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)


def require_place_for_system_prompt(part: Part) -> None:
    """Checks that a system prompt can be rendered; raises a ConfigError if not."""
    if part.system_prompt is not None and not part.chat_template:
        raise ConfigError("prompts.system_prompt is set, but prompts.chat_template = false leaves no place for it")


def require_renderable(row: Row, number: int, part: Part) -> None:
    """Checks that a row's prompt has the configured form: text or, with a chat template, also messages.

    Raises:
        ConfigError: it has not; names the row.
    """
    column = part.columns.get("prompt", part.prompt_name)
    value = row[part.prompt_name]
    if isinstance(value, str):
        require_unicode(value, number, part)
        return
    if not part.chat_template:
        raise ConfigError(
            f"row {number}: column {column!r} is {type(value).__name__}, expected text; "
            "chat messages need prompts.chat_template = true"
        )
    try:
        CONVERSATION.validate_python(value, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = "".join(f"[{part!r}]" for part in fault["loc"])
        raise ConfigError(
            f"row {number}: column {column!r} is {value!r:.80}, expected text or a list of chat messages with a "
            f"role: correct {column}{where} ({fault['msg']}), or set prompts.column"
        ) from error


def require_unicode(prompt: str, number: int, part: Part) -> None:
    """Checks that a row's prompt can be encoded.

    Raises:
        ConfigError: it cannot; names the row.
    """
    if not is_unicode(prompt):
        raise ConfigError(
            f"prompts.source {part.source!r}, row {number}: its prompt has half of a letter (a lone surrogate, "
            'such as "\\ud800"), which is no text: correct it'
        )


def _conversation(value: Any, part: Part) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": part.system_prompt}] if part.system_prompt is not None else []
    if isinstance(value, str):
        return [*system, {"role": "user", "content": value}]
    return value if value[0]["role"] == "system" else [*system, *value]
