"""One parser for every command: what is found wherever it stands, and what a mistake is told."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.file import load_config
from async_rl.config.keys import find_key, keys_of, option_keys
from async_rl.config.sections import Config
from async_rl.shared.programs.command_line import Commands, Parser
from tests.support.minimal_config import MINIMAL


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(MINIMAL)
    return path


def make_parser() -> Parser:
    parser = Parser("async-rl run", "Runs.", "CONFIG", Config)
    parser.add_argument("config", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=5)
    return parser


def dumped(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


VALUES = {
    "train.iterations": st.integers(1, 10**6),
    "prompts.chat_template": st.booleans(),
    "prompts.system_prompt": st.text(min_size=1).filter(lambda text: "\0" not in text),
    "tracking.project": st.sampled_from(["a b", "--column", "-x", "true", "4", "--", "a=b", "[run]", '"quoted"']),
    "optimizer.learning_rate": st.floats(1e-9, 1.0),
    "rollout.stop": st.lists(st.integers(-5, 99), max_size=3),
    "pool.instances": st.just([]),
    "rollout.max_response_tokens": st.integers(1, 99),
    "run.dir": st.sampled_from(["-5", "runs/b c", "0x10"]),
    "inference.engine": st.sampled_from(["transformers"]),
    "prompts.task_options": st.just({"min_word_len": 3, "words": ["a", "b"]}),
    "evaluation.sets": st.just([{"name": "held-out", "source": "rows.jsonl", "num_samples": 2}]),
}


def is_key(name: str) -> bool:
    return name.startswith("--") and find_key(Config, name.removeprefix("--")) is not None


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], dict[str, Any]]:
    """Words of a command in any order, and the values they set."""
    values = {key: draw(VALUES[key]) for key in draw(st.sets(st.sampled_from(sorted(VALUES))))}
    parts: list[list[str]] = [["run.toml"]]
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        # Only `=` can say that a value looks like one of the command's own options.
        name = text.partition("=")[0]
        looks_own = name in ("--", "-h", "--help", "--dry-run", "--max-tokens") or is_key(name)
        parts.append([f"--{key}={text}"] if looks_own or draw(st.booleans()) else [f"--{key}", text])
    if draw(st.booleans()):
        parts.append(["--dry-run"])
    return [word for part in draw(st.permutations(parts)) for word in part], values


@settings(max_examples=200)
@given(command_lines())
def test_any_order_of_options_and_positional_is_the_same_config(
    config_file: Path, line: tuple[list[str], dict[str, Any]]
) -> None:
    words, values = line
    parser = make_parser()
    arguments = parser.parse_args(words)
    assert arguments.config == Path("run.toml")
    assert arguments.dry_run == ("--dry-run" in words)
    loaded = dumped(load_config(config_file, parser.overrides))
    for key, value in values.items():
        section, name = key.split(".")
        expected = [EvaluationSet(**each).model_dump(mode="json") for each in value] if name == "sets" else value
        assert loaded[section][name] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.toml", "--train.iteratons", "4"], "unknown key 'train.iteratons': did you mean 'train.iterations'?"),
        (["run.toml", "--trian.iterations", "4"], "did you mean 'train.iterations'? the sections are run, model,"),
        (["run.toml", "--train.learning_rate", "4"], "'optimizer.learning_rate'? [train] has iterations,"),
        (["run.toml", "--iterations", "4"], "did you mean '--train.iterations'?"),
        (["run.toml", "--dry"], "unknown option '--dry': did you mean '--dry-run'?"),
        (["run.toml", "--train.iter", "4"], "unknown key 'train.iter'"),
        (["run.toml", "--max-t", "4"], "did you mean '--max-tokens'?"),
        (["run.toml", "--train.iterations"], "--train.iterations has no value: write --train.iterations INT"),
        (
            ["--run.resume", "--dry-run", "a"],
            "--run.resume has no value, '--dry-run' follows: write --run.resume true|",
        ),
        (["run.toml", "--max-tokens", "x"], "argument --max-tokens: invalid int value: 'x'"),
        (["--train.iterations", "4"], "required: config"),
        (["a.toml", "b.toml"], "unrecognized arguments: b.toml"),
        (["a.toml", "-x"], "unknown option '-x'"),
        (["a.toml", "--qqqq"], "unknown option '--qqqq': there are --help, --dry-run, --max-tokens"),
    ],
)
def test_a_mistake_is_told_with_what_was_meant(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_words_after_two_dashes_are_positional_or_for_another_program() -> None:
    assert make_parser().parse_args(["--", "--odd.toml"]).config == Path("--odd.toml")
    parser = make_parser()
    parser.keep_rest()
    assert parser.parse_args(["a.toml", "--dry-run", "--", "--dry-run", "--", "x"]).config == Path("a.toml")
    assert parser.rest == ("--dry-run", "--", "x")


def test_the_last_of_several_values_counts(config_file: Path) -> None:
    parser = make_parser()
    parser.parse_args(["--train.iterations=7", str(config_file), "--train.iterations", "8"])
    assert load_config(config_file, parser.overrides).train.iterations == 8


def test_a_key_of_a_table_is_set_by_its_dotted_name(config_file: Path) -> None:
    parser = make_parser()
    parser.parse_args([str(config_file), "--prompts.task_options.min_word_len", "4"])
    assert load_config(config_file, parser.overrides).prompts.task_options == {"min_word_len": 4}


def commands() -> Commands:
    add = Parser("fleet add", "Adds.", "URL")
    add.add_argument("url_of_it")
    add.add_argument("--url")
    return Commands("fleet", "All.", {"add": add, "ls": Parser("fleet ls", "Lists.", "")})


@pytest.mark.parametrize("words", [["--url", "u", "add", "x"], ["add", "--url", "u", "x"], ["add", "x", "--url=u"]])
def test_options_may_stand_before_the_name_of_a_command(words: list[str]) -> None:
    command, arguments = commands().parse(words)
    assert (command, arguments.url_of_it, arguments.url) == ("add", "x", "u")


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["ad"], 2)])
def test_no_command_or_an_unknown_one_shows_which_there_are(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        commands().parse(words)
    assert end.value.code == code
    shown = "".join(capsys.readouterr())
    assert "add" in shown and ("did you mean 'add'?" in shown) == (words == ["ad"])


PROGRAM = """
import runpy, sys
module, *sys.argv[1:] = sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    heavy = {"torch", "transformers", "pyarrow", "aiohttp"} & set(sys.modules)
    sys.exit(end.code or (f"imported {heavy}" if heavy else 0))
"""

WITH_KEYS = {
    "deploy.local.run": "async-rl run",
    "deploy.local.check": "async-rl check",
    "deploy.doctor": "async-rl doctor",
    "deploy.local.evaluate": "async-rl eval",
    "deploy.quickstart": "async-rl quickstart",
    "trainer": "torchrun -m async_rl.trainer",
}
WITHOUT_KEYS = {
    "deploy.init": "async-rl init",
    "trainer.export": "async-rl export",
    "inference_service": "async-rl serve",
    "async_rl.rollouts.fleet.cli": "async-rl fleet",
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(
            name, marks=() if name in ("deploy.local.run", "async_rl.rollouts.fleet.cli") else pytest.mark.nightly
        )
        for name in (*WITH_KEYS, *WITHOUT_KEYS)
    ],
)
def test_help_names_the_command_and_every_key_without_loading_anything_heavy(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {(WITH_KEYS | WITHOUT_KEYS)[module]} ")
    if module in WITHOUT_KEYS:
        return
    shown = done.stdout
    for key in (*keys_of(Config).values(), *option_keys(Config).values()):
        default = "required" if key.default is None else f"default {key.default}"
        assert f"--{key.name} {key.takes}  ({default})\n      {key.description}\n" in shown
    assert re.findall(r"^\[(\w+)\]$", shown, flags=re.MULTILINE) == list(Config.model_fields)


def test_a_word_for_a_command_that_takes_options_only_is_named_as_it_was_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser("async-rl status", "Shows a run.", "[OPTIONS]")
    parser.add_argument("--run")
    with pytest.raises(SystemExit):
        parser.parse_args(["runs/mine"])
    assert "unexpected 'runs/mine': there are --help, --run" in capsys.readouterr().err
