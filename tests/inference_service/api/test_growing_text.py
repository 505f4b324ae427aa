"""Text that grows by tokens: the pieces add up, and no piece ends within a character."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from inference_service.api.completion_choice import GrowingText


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


SPECIAL = ["<unk>", "<s>", "<eos>"]
CORPUS = ["hello world, naïve café 😀😀 👨‍👩‍👧 日本語 тест ok a b do n't"] * 50
PIECES = ("😀", "é", "日", " ok", " a", "👨‍👩‍👧", "  ", "n't")


def byte_level() -> Tokenizer:
    """As Qwen's and Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, trainers.BpeTrainer, 330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def sentence_piece() -> Tokenizer:
    """As Llama 2's: bytes for what it has no token for, and no space at the beginning of a text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([f"<0x{byte:02X}>" for byte in range(256)])
    return trained(tokenizer, trainers.BpeTrainer, 80)


def word_piece() -> Tokenizer:
    """A space before each word but the first."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return trained(tokenizer, trainers.WordPieceTrainer, 80)


def trained(tokenizer: Tokenizer, trainer: Callable[..., Any], vocab_size: int, **options: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer(vocab_size=vocab_size, special_tokens=SPECIAL, **options))
    return tokenizer


class Codec:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def draw_tokens(rng: random.Random, codec: Codec, others: Sequence[int], is_cut: bool) -> list[int]:
    """Special tokens, texts, with `is_cut` ended anywhere, and any of the `others`."""
    tokens: list[int] = []
    for _ in range(rng.randint(1, 14)):
        whole = codec.encode(rng.choice(PIECES))
        cut = whole[: rng.randint(1, max(1, len(whole)))] if is_cut else whole
        tokens += rng.choice([[rng.randrange(len(SPECIAL))], cut, [rng.choice(others)]])
    return tokens


@pytest.mark.parametrize("make", [byte_level, sentence_piece, word_piece])
def test_pieces_of_any_tokens_add_up_with_any_kind_of_tokenizer(make: Callable[[], Tokenizer]) -> None:
    tokenizer, rng = make(), random.Random(0)
    codec = Codec(tokenizer)
    # One byte too many makes its decoder take back the whole characters before it, which may have been shown.
    takes_back = make is sentence_piece
    others = [i for token, i in tokenizer.get_vocab().items() if not (takes_back and token.startswith("<0x"))]
    for _ in range(1000):
        tokens, text, start = draw_tokens(rng, codec, others, not takes_back), GrowingText(codec), 0
        shown = ""
        while start < len(tokens):
            end = start + rng.randint(1, 4)
            shown += text.add(tokens[start:end], end >= len(tokens))
            start = end
        assert shown == codec.decode(tokens, True), tokens
