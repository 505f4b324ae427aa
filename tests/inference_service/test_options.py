"""The command line of an instance: what is taken, what ends the program, and which paths hold a model."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import ConfigError
from inference_service.options import Options, parse_options, require_checkpoint

MODEL = ("--model", "m")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse_options(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_model_is_all_that_is_needed() -> None:
    assert parse_options(MODEL) == Options(
        engine="transformers",
        model="m",
        host="127.0.0.1",
        port=8000,
        device="cpu",
        tensor_parallel=1,
        dtype="float32",
        max_concurrency=64,
        max_model_len=None,
        logprobs_mode="processed_logprobs",
        exact=False,
        asleep=False,
        served_model_name=None,
        register=None,
        advertise=None,
        name=None,
        patience_s=None,
        check=False,
        engine_options=(),
    )


@given(st.integers(0, 65_535), st.integers(1, 10**6), st.lists(st.sampled_from(["--model", "x", "--", "-1", ""])))
def test_numbers_are_read_and_words_after_the_dashes_are_vllms_alone(port: int, number: int, words: list[str]) -> None:
    more = ("--port", str(port), "--max-concurrency", str(number), "--max-model-len", str(number), "--tp", str(number))
    options = parse_options([*MODEL, "--engine", "vllm", *more, "--", *words])
    assert (options.port, options.max_concurrency, options.max_model_len) == (port, number, number)
    assert options.tensor_parallel == number
    assert (options.model, options.engine_options) == ("m", tuple(words))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model"),
        ((*MODEL, "--port", "65536"), "65536 is no port: expected 0 to 65535"),
        ((*MODEL, "--port", "-1"), "-1 is no port: expected 0 to 65535"),
        ((*MODEL, "--max-concurrency", "0"), "0 is too small: expected at least 1"),
        ((*MODEL, "--max-model-len", "x"), "x"),
        ((*MODEL, "--engine", "other"), "other"),
        ((*MODEL, "--tp", "2"), "--tp 2 needs --engine vllm: the transformers engine has one worker"),
        ((*MODEL, "--device", "npu"), "--device npu needs --engine vllm"),
        ((*MODEL, "--exact", "--dtype", "bfloat16"), "--dtype float32, not transformers on cpu in bfloat16"),
        ((*MODEL, "--", "--swap"), "arguments after -- are for --engine vllm: --swap"),
        (
            (*MODEL, "--name", "n"),
            "--advertise, --name and --patience-s are for an instance that joins a fleet: give --register",
        ),
        ((*MODEL, "--patience-s", "5"), "give --register too"),
        ((*MODEL, "--register", "http://h:1", "--patience-s", "-1"), "-1 is no duration: expected seconds"),
        ((*MODEL, "--advertise", "http://h:1"), "give --register too"),
    ],
)
def test_a_mistake_ends_the_program_with_what_was_expected(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *arguments)


def test_a_checkpoint_is_a_directory_with_a_config_or_may_be_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in (".", "model", "./a/b", "/a/b", "~/a", "a/b/c", ""):
        with pytest.raises(ConfigError, match=r"no model at .*: expected a directory with config\.json and"):
            require_checkpoint(missing)
    require_checkpoint("owner/name")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for there in ("model", "./model", str(tmp_path / "model")):
        require_checkpoint(there)
