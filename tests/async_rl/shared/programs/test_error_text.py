"""What commands show of an error, whoever wrote its text."""

import pytest

from async_rl.errors import RewardError
from async_rl.shared.programs.error_text import MAX_CHARACTERS, error_text
from deploy.cluster.stopping import explain_end


def test_an_error_neither_controls_the_terminal_nor_fills_it() -> None:
    text = error_text(ValueError("\x1b[31mboom\r\x07\n\tas it is: ü 😀" + "x" * 10**6 + "the end"))
    assert not set(text) & {"\x1b", "\r", "\x07"} and "boom" in text and "\n\tas it is: ü 😀" in text
    assert text.endswith("the end") and len(text) < MAX_CHARACTERS + 100


@pytest.mark.parametrize(
    "text",
    [
        "rollout.program 'command:agent --token hidden --password=hidden' has no program",
        "model.path 'https://me:hidden@host/x' does not exist",
        "prompts.source 's3://AKIA:hidden@bucket/x.jsonl' cannot be read",
        "cannot read https://host/x?sig=hidden&token=hidden",
    ],
)
def test_an_error_has_no_secrets(text: str) -> None:
    assert "hidden" not in error_text(ValueError(text))


def test_launchers_show_errors_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_end(RewardError("reward x raised \x1b[31mred --token=hidden")) == 1
    said = capsys.readouterr().err
    assert "reward x raised" in said and "\x1b[31mred" not in said and "hidden" not in said
