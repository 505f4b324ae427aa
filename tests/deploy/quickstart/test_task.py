from pathlib import Path

from transformers import AutoTokenizer, Qwen3Config

from deploy.quickstart.splits import read_rows, write_rows
from deploy.quickstart.task import (
    ANSWER_MARK,
    INSTRUCTION,
    NUM_HELD_OUT,
    NUM_PROMPTS,
    make_splits,
    make_tokenizer,
)


def test_no_word_is_in_two_sets() -> None:
    splits = make_splits(seed=0)
    sets = [
        {row["word"] for row in rows}
        for rows in (splits.held_out, splits.validation, splits.warm_start, splits.prompts)
    ]
    assert len(set().union(*sets)) == sum(len(words) for words in sets)
    assert len(sets[0]) == NUM_HELD_OUT
    assert len(sets[3]) == NUM_PROMPTS


def test_splits_are_a_function_of_the_seed() -> None:
    assert make_splits(3) == make_splits(3)
    assert make_splits(3).held_out != make_splits(4).held_out


def test_rows_ask_for_the_word_backward() -> None:
    row = make_splits(0).prompts[0]
    assert row["prompt"] == INSTRUCTION + row["word"] + ANSWER_MARK
    assert row["answer"] == row["word"][::-1]


def test_rows_survive_their_file(tmp_path: Path) -> None:
    rows = make_splits(0).held_out
    write_rows(tmp_path / "data" / "rows.jsonl", rows)
    assert read_rows(tmp_path / "data" / "rows.jsonl") == rows


def test_the_tokenizer_survives_saving_and_loading(tmp_path: Path) -> None:
    made = make_tokenizer()
    made.save_pretrained(tmp_path)
    Qwen3Config(vocab_size=len(made)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = make_splits(0).prompts[0]["prompt"]
    assert loaded(text)["input_ids"] == made(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (made.eos_token_id, made.pad_token_id)


def test_the_instruction_is_one_token_and_every_letter_is_one() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer(f"{INSTRUCTION}abc{ANSWER_MARK}")["input_ids"]) == 5
    assert tokenizer.decode(tokenizer(f"cba{tokenizer.eos_token}")["input_ids"], skip_special_tokens=True) == "cba"
