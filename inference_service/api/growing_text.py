"""Incremental detokenization: the text that each new token adds to a response."""

from typing import Final

from inference_service.api.responses import TextCodec

UNFINISHED: Final = "\ufffd"
"""What a tokenizer returns for bytes that are not a whole character yet."""


class GrowingText:
    """Concatenated, the pieces are the text of all tokens.

    A token's text may depend on its neighbours, so a piece is what the new tokens add to the text of the previous
    piece: `_ids` holds the tokens of both, of which the first `_num_shown` have been shown. Tokens without text, such
    as special ones, do not count as the previous piece: a tokenizer treats the text after them like the beginning of a
    text.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._num_shown = 0

    def add(self, token_ids: list[int], last: bool) -> str:
        """The text of these tokens; text that ends within a character is held back, unless `last`."""
        self._ids += token_ids
        shown = self._codec.decode(self._ids[: self._num_shown], skip_special_tokens=True)
        text = self._codec.decode(self._ids, skip_special_tokens=True)
        if text.endswith(UNFINISHED) and not last:
            return ""
        piece = text[len(shown) :]
        if piece:
            self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        return piece
