"""Texts that end a response, found in the text of its last tokens; used by the sequences of the embedded engine."""

from collections.abc import Sequence
from typing import Final, Protocol

SILENT_TOKENS: Final = 16
"""Room for tokens without text, such as special ones, among those of a stop text."""


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class StopTexts:
    """`num_tokens` of a response's last tokens hold any of the texts: a token has at least one byte."""

    def __init__(self, texts: Sequence[str], decoder: Decoder) -> None:
        self._texts = tuple(texts)
        self._decoder = decoder
        self.num_tokens = max(len(text.encode("utf-8", "surrogatepass")) for text in texts) + SILENT_TOKENS

    def are_in(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of these tokens has one of the texts."""
        text = self._decoder.decode(token_ids, skip_special_tokens=True)
        return any(stop in text for stop in self._texts)
