"""No tokenizer makes fewer tokens of messages than their length is said to need."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from async_rl.rollouts.agents.turn_limits import LETTERS, least_tokens, max_letters_of

WORDS = "to be or not to be that is the question whether it is nobler in the mind to suffer aaaaaaaaaaaaaaaa 0000"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def byte_level() -> Any:
    """As GPT's and Qwen's: bytes that are merged, after letters and their accents were composed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=ALPHABET, special_tokens=["<|im_start|>"])
    tokenizer.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def unigram() -> Any:
    """As T5's, with a token for what is unknown, which takes any number of letters that it does not know."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [chr(letter) for letter in LETTERS]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, initial_alphabet=alphabet, special_tokens=["<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte level": byte_level(), "unigram": unigram()}
TEXTS = st.one_of(
    st.text(st.sampled_from("ab e\u0301\u00e9\u0928\ufb01 0<|im_start|>"), max_size=80),
    st.lists(st.sampled_from([*WORDS.split(), "a" * 16, "0" * 9, " ", "\n"]), max_size=30).map("".join),
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS)
def test_a_text_has_at_least_so_many_tokens(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    most = max_letters_of(tokenizer)
    assert most is not None
    least = least_tokens([{"role": "user", "content": text}], most)
    assert least <= len(tokenizer([text], add_special_tokens=False)["input_ids"][0])


def test_the_bound_is_that_of_the_longest_token() -> None:
    assert max_letters_of(TOKENIZERS["byte level"]) == 16
    assert least_tokens([{"role": "user", "content": "a" * 1600}], 16) == 100


def test_what_the_policy_says_is_not_counted_since_templates_may_leave_it_out() -> None:
    said = [{"role": "assistant", "content": "a" * 1600}]
    assert least_tokens(said, 16) == 0
    assert least_tokens([*said, {"role": "tool", "content": "a" * 33}], 16) == 3


def test_nothing_is_refused_where_one_token_may_be_any_word() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, **{chr(letter): 1 + letter for letter in LETTERS}}, "<unk>"))
    letters = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    for tokenizer in (words, letters):
        assert max_letters_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) is None
    assert least_tokens([{"role": "user", "content": "a" * 10**6}], None) == 0
