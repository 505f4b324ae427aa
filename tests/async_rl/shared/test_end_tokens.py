"""What ends a response: the union of what a checkpoint's files name, the same for whoever reads them."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from async_rl.errors import ConfigError
from async_rl.rollouts.tokenizer import load_tokenizer
from async_rl.shared.end_tokens import EndTokens
from inference_service.engine.model import load_model


def ends_of(tokenizer: Any, generation: Any, config: Any) -> EndTokens:
    return EndTokens.of(tokenizer, {"eos_token_id": generation}, {"eos_token_id": config}, 96)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((2, [2, 0], 2), (0, 2)),
        ((2, None, 0), (0, 2)),
        ((2, 2, None), (2,)),
        ((None, None, 0), (0,)),
        ((None, None, None), ()),
        ((7, 8, 9), (7, 8, 9)),
        # None of the vocabulary, none at all.
        ((7, [96, -1, True, "x"], [95]), (7, 95)),
    ],
)
def test_every_source_counts(sources: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    assert ends_of(*sources).ids == expected


@pytest.mark.parametrize(
    ("sources", "warning"),
    [
        ((2, [2, 0], 2), None),
        ((2, None, None), None),
        ((2, 2, 2), None),
        ((2, 0, 0), r"the tokenizer names \[2\], generation_config.json \[0\], config.json \[0\]"),
        ((None, None, None), "responses end at rollout.max_response_tokens only"),
    ],
)
def test_a_user_is_told_when_none_is_named_or_no_source_names_all(
    sources: tuple[Any, ...], warning: str | None
) -> None:
    found = ends_of(*sources).warning
    assert found is None if warning is None else re.search(warning, found or "")


def test_what_only_transformers_takes_for_a_class_is_said() -> None:
    """LlamaConfig has 2, also where config.json names none."""
    made = {"eos_token_id": 2}
    assert EndTokens.of(2, {}, made, 96, config_file={}).warning is None
    assert EndTokens.of(None, {}, made, 96, config_file={"text_config": made}).warning is None
    for tokenizer, generation in ((None, {}), (5, {}), (5, {"eos_token_id": 5})):
        ends = EndTokens.of(tokenizer, generation, made, 96, config_file={})
        assert 2 in ends.ids and "config.json none, for which transformers takes [2]" in (ends.warning or "")


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [([5, 6], 5, (1, 5, 6)), (None, None, (1,)), (5, None, (1, 5)), (1, 1, (1,))]
)
def test_trainer_and_engine_find_the_same_in_a_checkpoint(
    generation: Any,
    config: Any,
    expected: tuple[int, ...],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its tokenizer names 1."""
    path = Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "model"))
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        written = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(written | {"eos_token_id": value}))
    with caplog.at_level(logging.WARNING):
        tokenizer, tokens = load_tokenizer("m", path)
        loaded = load_model(str(path), torch.device("cpu"), torch.float32)
    assert tokens.end_token_ids == expected and loaded.eos_ids == set(expected)
    assert caplog.text.count("its end tokens differ") == (2 if generation and generation != 1 else 0)
    assert tokens.vocab_size == 96
    assert tokens.text_of(tokenizer(["ab"], add_special_tokens=False)["input_ids"][0], False) == "ab"


def test_texts_are_those_of_the_tokens_whatever_a_tokenizers_file_asks(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Spaces before punctuation stay: a stop text such as " ." would never be found in a text without them."""
    path = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    alphabet = [(letter, -1.0) for letter in ("<unk>", "a", "b", " ", ".", "?")]
    backend = Tokenizer(Unigram(alphabet, unk_id=0))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    tokenizer.save_pretrained(path)
    token_ids = [1, 3, 4, 2, 3, 5]
    assert AutoTokenizer.from_pretrained(path).decode(token_ids) == "a.b?"
    tokenizer, tokens = load_tokenizer("m", path)
    codec = load_model(str(path), torch.device("cpu"), torch.float32).codec
    assert codec is not None
    texts = {tokenizer.decode(token_ids), tokens.text_of(token_ids, False), codec.decode(token_ids, False)}
    assert {*texts, *tokenizer.batch_decode([token_ids])} == {"a .b ?"}


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"version": "2.0"},
        {"model": {"type": "Later"}},  # as a file of a later version of the package tokenizers
        {"added_tokens": None},
        {"added_tokens": [1]},
        {"decoder": []},
    ],
)
def test_a_tokenizer_that_does_not_load_is_a_named_error(
    tokenizer: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer))
    with pytest.raises(ConfigError, match=r"model\.path 'mine' has no tokenizer that loads: .+"):
        load_tokenizer("mine", tmp_path / "model")
