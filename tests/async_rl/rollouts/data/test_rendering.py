"""From a row to the text and the tokens of its prompt, with real templates and tokenizers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.method.types import Prompt
from async_rl.rollouts.data.prompts import PromptSource
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.word_tokenizer import NUM_WORDS, word_tokenizer

USER = {"role": "user", "content": "2 + 2"}


def prompts_of(tokenizer: Any, folder: Path, rows: list[Any], **settings: Any) -> dict[int, Prompt]:
    """Of each row that is trained, by its number."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    source = PromptSource.load(PromptsSection(source=str(path), prompts_per_batch=1, **settings), tokenizer, 0)
    prompts = (source.batch(i).prompts[0] for i in range(len(source)))
    return {int(prompt.prompt_id): prompt for prompt in prompts}


def texts_of(tokenizer: Any, folder: Path, rows: list[Any], **settings: Any) -> list[str]:
    found = prompts_of(tokenizer, folder, rows, **settings)
    return [tokenizer.decode(list(found[number].token_ids)) for number in sorted(found)]


def test_a_conversation_that_ends_with_the_assistant_is_continued(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path)
    begun = {"role": "assistant", "content": "It is"}
    opened = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    rows = [[USER, begun], [USER], [USER, {"role": "assistant", "content": ""}], "2 + 2", [USER, begun, USER]]
    texts = texts_of(tokenizer, tmp_path, rows)
    assert texts[:4] == [opened + "It is", opened, opened, opened]
    assert texts[4].endswith(opened.split("2 + 2")[1]) and "It is<|im_end|>" in texts[4]
    system = texts_of(tokenizer, tmp_path, rows[:1], system_prompt="Be brief")
    assert system[0].endswith("It is") and "Be brief" in system[0]
    for last in ({"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": []}):
        with pytest.raises(ConfigError, match="row 1: column 'prompt' ends with a message of the assistant without"):
            texts_of(tokenizer, tmp_path, [[USER], [USER, last]])


def test_a_plain_prompt_keeps_its_bos_and_is_not_ended(tmp_path: Path) -> None:
    tokenizer = word_tokenizer().__class__(tokenizer_object=word_tokenizer().backend_tokenizer, unk_token="[UNK]")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    bos, eos = NUM_WORDS + 1, NUM_WORDS + 2
    for single, before in (("<s> $A </s>", [bos]), ("$A </s>", []), ("<s> $A", [bos]), ("$A </s> </s>", [])):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[("<s>", bos), ("</s>", eos)]
        )
        found = prompts_of(tokenizer, tmp_path, ["1 2", "3", "4 </s>"], chat_template=False)
        # What the row itself has stays.
        expected = [[*before, 1, 2], [*before, 3], [*before, 4, eos]]
        assert [list(found[number].token_ids) for number in range(3)] == expected


def test_the_template_gets_its_arguments(tmp_path: Path) -> None:
    template = (
        "{{ messages[0].content }} {{ 'thinks' if enable_thinking else 'answers' }} {{ date | default('today') }}"
    )
    tokenizer = make_chat_tokenizer(tmp_path, template=template)
    assert texts_of(tokenizer, tmp_path, ["1"]) == ["1 answers today"]
    arguments = {"enable_thinking": True, "date": "1 May"}
    assert texts_of(tokenizer, tmp_path, ["1"], chat_template=arguments) == ["1 thinks 1 May"]
    for name in ("tokenize", "add_generation_prompt", "tools"):
        with pytest.raises(ValueError, match=f"chat_template has {name}, which the rendering of prompts sets"):
            PromptsSection(source="x", prompts_per_batch=1, chat_template={name: 1})


@pytest.mark.parametrize(
    ("template", "arguments", "asks"),
    [
        ("{{ strftime_now('%d') }} {{ messages[0].content }}", {}, True),
        ("{{ date if date is defined else strftime_now('%d') }} {{ messages[0].content }}", {}, True),
        ("{{ date if date is defined else strftime_now('%d') }} {{ messages[0].content }}", {"date": "1"}, False),
        ("{{ messages[0].content }}", {}, False),
        ({"default": "{{ messages[0].content }}", "tool_use": "{{ strftime_now('%d') }}"}, {}, True),
    ],
)
def test_a_template_that_asks_the_clock_is_named(
    template: Any, arguments: dict[str, Any], asks: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_chat_tokenizer(tmp_path, template=template)
    with caplog.at_level(logging.WARNING):
        texts_of(tokenizer, tmp_path, ["1"], chat_template=arguments)
    assert ("the tokenizer's chat template asks for the date" in caplog.text) == asks


def test_what_is_held_out_depends_on_the_rows_and_not_on_their_rendering(tmp_path: Path) -> None:
    rows = [str(i) for i in range(200)]

    def trained(template: str, form: Any = str, **settings: Any) -> set[int]:
        tokenizer = make_chat_tokenizer(tmp_path, template=template)
        return set(prompts_of(tokenizer, tmp_path, [form(row) for row in rows], held_out=0.3, **settings))

    first = trained("{{ messages[-1].content }}")
    assert 100 < len(first) < 180
    assert trained("{{ messages | length }} {{ messages[-1].content }}") == first
    assert trained("{{ messages | length }} {{ messages[-1].content }}", system_prompt="Think") == first
    assert trained("{{ messages[-1].content }}", lambda row: [{"role": "user", "content": row}]) == first
    assert trained("{{ messages[-1].content }} {{ x }}", chat_template={"x": 1}) == first


def test_no_text_is_both_held_out_and_trained(tmp_path: Path) -> None:
    """Rows of which the template takes the first letter only."""
    tokenizer = make_chat_tokenizer(tmp_path, template="{{ messages[-1].content[0] }}")
    rows = [f"{letter}{i}" for letter in "abcdefgh" for i in range(20)]
    trained = prompts_of(tokenizer, tmp_path, rows, held_out=0.02)
    letters = {rows[number][0] for number in trained}
    assert letters and all(rows[number][0] not in letters for number in set(range(len(rows))) - set(trained))
