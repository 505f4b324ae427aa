"""What a program may ask of a turn; `session` refuses everything else."""

from collections.abc import Sequence

from async_rl.config.prompts_section import MAX_STOPS
from async_rl.rollout.messages import InvalidRequest, Message

MAX_TOKEN_ID = 2**31


def require_well_formed(
    messages: Sequence[Message] | None, token_ids: Sequence[int] | None, max_tokens: int | None, stop: Sequence[str]
) -> None:
    """Checks the arguments of `generate`, which programs pass on as they got them; messages are checked elsewhere.

    Raises:
        InvalidRequest: one is not what it must be; names it and its value.
    """
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise InvalidRequest(f"max_tokens is {max_tokens!r:.80}: expected a number from 1")
    if (messages is None) == (token_ids is None):
        raise InvalidRequest("generate takes either messages or token_ids")
    if (
        isinstance(stop, str)
        or not isinstance(stop, Sequence)
        or not all(isinstance(text, str) and text for text in stop)
    ):
        raise InvalidRequest(f"stop is {stop!r:.80}: expected a list of texts")
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stop)} texts: expected {MAX_STOPS} at most")
    if messages is None:
        _require_token_ids(token_ids)


def _require_token_ids(token_ids: Sequence[int] | None) -> None:
    if not isinstance(token_ids, Sequence) or not token_ids:
        raise InvalidRequest(f"token_ids is {token_ids!r:.80}: expected a list of at least one token id")
    if not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in token_ids):
        raise InvalidRequest(f"token_ids is {token_ids!r:.80}: expected integers from 0")
