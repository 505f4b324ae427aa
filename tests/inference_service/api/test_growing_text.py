"""Text that grows by tokens: the pieces add up, and no piece ends within a character."""

from collections.abc import Sequence

import pytest

from inference_service.api.growing_text import GrowingText


class Bytes:
    """One token per byte of UTF-8; token 256 is special, and token 257 writes a space where it is not the first."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        data = bytearray()
        for place, token in enumerate(token_ids):
            if token < 256:
                data.append(token)
            elif token == 257 and place > 0:
                data += b" "
        return data.decode(errors="replace")


TEXT = "naïve 😀 ok é"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pieces_add_up_to_the_whole_text_and_hold_whole_characters(size: int) -> None:
    tokens = [256, *Bytes().encode(TEXT), 257, 65, 257, 66, 256]
    text = GrowingText(Bytes())
    pieces = [text.add(tokens[i : i + size], i + size >= len(tokens)) for i in range(0, len(tokens), size)]
    assert "".join(pieces) == Bytes().decode(tokens, True) == TEXT + " A B"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_never_ends_is_shown_with_the_last_piece() -> None:
    text = GrowingText(Bytes())
    assert text.add([65, 0xF0, 0x9F], False) == ""
    assert text.add([0x98], True) == "A\ufffd"
