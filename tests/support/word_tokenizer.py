"""A fast tokenizer of numbers and a few words, with a chat template, for tests of data."""

from functools import cache

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_WORDS = 2000
"""The words 0 to 1999 are tokens of these ids; any other is the next one."""

TEMPLATE = "{% for m in messages %}{{m.role}} : {{m.content}} \n{% endfor %}"


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {str(i): i for i in range(NUM_WORDS)} | {"[UNK]": NUM_WORDS}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.chat_template = TEMPLATE
    return tokenizer
