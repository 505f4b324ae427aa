"""Each value of a config is shown with where it comes from, and secrets are not shown."""

from pathlib import Path

import pytest

from async_rl.config.file import load_config
from async_rl.config.keys import keys_of
from async_rl.config.prompts_section import MixturePart
from async_rl.config.reward_section import RewardPart
from async_rl.config.secrets import MASK, masked, masked_words
from async_rl.config.sections import Config
from async_rl.config.sources import lines_of_keys, sourced_values
from async_rl.errors import ConfigError
from tests.support.minimal_config import MINIMAL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run]\ndir = 'x'\n\n[train]\n# a comment\niterations = 3", {"run.dir": 2, "train.iterations": 6}),
        ("train.iterations = 3\nrun = {dir = 'x', seed = 1}", {"train.iterations": 1, "run.dir": 2, "run.seed": 2}),
        ('[model]\npath = """\n[train]\niterations = 9\n"""\n[run]\ndir="a"', {"model.path": 2, "run.dir": 7}),
        (
            "[rollout]\nstop = [\n  '[run]',\n  'b',\n]\n[rollout.options]\nmax_turns = 2",
            {"rollout.stop": 2, "rollout.options": 6},
        ),
        ("[prompts.columns]\nanswer = 'a'\nprompt = 'q'", {"prompts.columns": 1}),
        ("[[prompts.mixture]]\nname = 'a'\n[[prompts.mixture]]\nname = 'b'", {"prompts.mixture": 1}),
        ('[ "run" ]\n"dir" = \'x\'', {"run.dir": 2}),
        ("[run]\r\ndir = 'a'\r\nseed = 1\r\n", {"run.dir": 2, "run.seed": 3}),
        (
            "[prompts]\nsystem_prompt = 'a\u2028b\x85c'\nreserve = 3",
            {"prompts.system_prompt": 2, "prompts.reserve": 3},
        ),
        ("", {}),
    ],
)
def test_the_line_of_each_key_is_found(text: str, expected: dict[str, int]) -> None:
    assert lines_of_keys(text) == expected


def test_every_key_has_a_source(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL + '\n[cluster.env]\nHF_TOKEN = "abc"\n')
    words = ("--train.iterations=5", "--prompts.task_options.min_word_len=5")
    values = {each.name: each for each in sourced_values(path, load_config(path, words), words)}
    assert list(values) == list(keys_of(Config))
    assert (values["run.seed"].value, values["run.seed"].source) == (0, "default")
    assert (values["run.dir"].value, values["run.dir"].source) == (Path("runs/x"), "run.toml:3")
    assert (values["train.iterations"].value, values["train.iterations"].source) == (5, "command line, run.toml:12")
    assert values["prompts.task_options"].source == "command line"
    assert values["cluster.env"].value == {"HF_TOKEN": MASK}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        (
            "cluster.env",
            {"WANDB_API_KEY": "k", "DB_PASSWORD": "p", "X": "1"},
            {"WANDB_API_KEY": MASK, "DB_PASSWORD": MASK, "X": "1"},
        ),
        ("pool.instances", ("http://me:secret@host:1",), [f"http://{MASK}@host:1"]),
        (
            "inference.engine_options",
            ("--api-key", "k", "--max-num-batched-tokens", "9"),
            ["--api-key", MASK, "--max-num-batched-tokens", "9"],
        ),
        ("rollout.program", "command:agent --token=k run", f"command:agent --token={MASK} run"),
        (
            "cluster.env",
            {"PRIVATE_KEY": "k", "DB_PWD": "p", "GITHUB_PAT": "t", "AUTH": "Bearer k", "API_KEY": ["k"], "PATH": "/x"}
            | {"PGPASSWORD": "p", "HFTOKEN": "t"},
            {"PRIVATE_KEY": MASK, "DB_PWD": MASK, "GITHUB_PAT": MASK, "AUTH": f"Bearer {MASK}", "API_KEY": MASK}
            | {"PATH": "/x", "PGPASSWORD": MASK, "HFTOKEN": MASK},
        ),
        ("cluster.slurm_options", ("--export=ALL,API_KEY=k,X=1",), [f"--export=ALL,API_KEY={MASK},X=1"]),
        (
            "reward.options.url",
            "http://host/x?token=k&size=2&api_key=l&sig=m",
            f"http://host/x?token={MASK}&size=2&api_key={MASK}&sig={MASK}",
        ),
        (
            "inference.engine_options",
            ('--extra={"token":"k", "size": 2}', "--x", "hf_abcdefghijklmnop"),
            [f'--extra={{"token":"{MASK}", "size": 2}}', "--x", MASK],
        ),
        ("prompts.columns", {"answer": "last_token", "prompt": "a token, b"}, None),
        ("ASYNC_RL_TOKEN", "k", MASK),
        ("reward.options", {"token_from": "env:A_TOKEN", "url": "x"}, {"token_from": "env:A_TOKEN", "url": "x"}),
        ("reward.options", {"token_from": "hidden"}, {"token_from": MASK}),
        ("rollout.max_response_tokens", 512, 512),
        ("rollout.stop", (1, "a"), [1, "a"]),
        ("algorithm.options.critic_path", None, None),
        ("prompts.system_prompt", "", ""),
        ("cluster.env", {"PGPASSWORD": "hidden"}, {"PGPASSWORD": MASK}),
        ("cluster.env", {"clientSecret": "hidden"}, {"clientSecret": MASK}),
        ("inference.engine_options", ("--dbPassword=hidden",), [f"--dbPassword={MASK}"]),
        ("model.path", "postgres://me:hid@den@host/db", f"postgres://{MASK}@host/db"),
        ("model.path", "http://host/a?to=me@host", None),
        ("rollout.program", "command:x 'Authorization: Basic hidden'", f"command:x 'Authorization: Basic {MASK}'"),
        ("rollout.program", "command:x -H X-Api-Key:hidden", f"command:x -H X-Api-Key:{MASK}"),
        ("prompts.system_prompt", "The secret of authorization is a password.", None),
        (
            "reward.options.url",
            "https://h/x?sas_key=k&X-Amz-Signature=s&n=2",
            f"https://h/x?sas_key={MASK}&X-Amz-Signature={MASK}&n=2",
        ),
        ("reward.options.url", "https://h/x?access_token_v2=k", f"https://h/x?access_token_v2={MASK}"),
        ("rollout.program", "command:x HF_TOKEN_PATH=/x MY_TOKEN_X=k", f"command:x HF_TOKEN_PATH=/x MY_TOKEN_X={MASK}"),
        ("reward.options.url", "me:hidden@host/v1", f"{MASK}@host/v1"),
        ("pool.instances", ("me:hidden@host:1", "http://host:2"), [f"{MASK}@host:1", "http://host:2"]),
        *((name, "hidden", MASK) for name in ("AUTH_TOKEN_2", "password1", "secret_key_base", "client_secret_json")),
        *((name, "hidden", MASK) for name in ("OPENAI_KEY", "DB_PASS", "MY_TOKEN_X", "AWS_ACCESS_KEY_ID")),
        *(
            (name, "shown", None)
            for name in ("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "monkey", "bypass", "token_ids")
        ),
        *(("model.path", text, None) for text in ("a/file:x@2.txt", "file:x@2.txt", "python:r.py:score", "C:/x@y")),
    ],
)
def test_what_looks_like_a_secret_is_masked(name: str, value: object, shown: object) -> None:
    assert masked(name, value) == (value if shown is None else shown)


def test_secrets_in_tables_of_a_list_are_masked() -> None:
    options = {"url": "http://h/?token=HIDDEN", "token_from": "HIDDEN"}
    part = RewardPart(name="http", options=options)
    source = MixturePart(name="a", source="https://u:HIDDEN@h/x.jsonl", task_options={"api_key": "HIDDEN"})
    for name, each in (("reward.parts", part), ("prompts.mixture", source)):
        shown = repr(masked(name, (each,)))
        assert "HIDDEN" not in shown and MASK in shown


def test_errors_of_a_config_quote_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        MINIMAL.replace('name = "math"', 'name = "http"\noptions.url = "http://me:hidden@host/x?token=hidden"')
        + '[inference]\nengine_options = ["--api-key", "hidden", "--token=hidden", "--x={\\"token\\":\\"hidden\\"}"]\n'
        + '[cluster.env]\nAPI_KEY = ["hidden"]\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["--run.api_key=hidden"])
    said = str(caught.value)
    assert "hidden" not in said and "run.api_key" in said and "cluster.env.API_KEY" in said
    path.write_text(path.read_text().replace("me:hidden@", "").partition("[cluster.env]")[0])
    with pytest.raises(ConfigError, match=r'"--api-key", "\*\*\*", "--token=\*\*\*"') as caught:
        load_config(path)
    assert "hidden" not in str(caught.value)


def test_a_command_is_masked_word_by_word() -> None:
    words = ["HF_TOKEN=abc", "python", "--token", "abc", "--prompts.max_prompt_tokens=5", "--token"]
    assert masked_words(words) == [
        f"HF_TOKEN={MASK}",
        "python",
        "--token",
        MASK,
        "--prompts.max_prompt_tokens=5",
        "--token",
    ]
