"""One thing wrong at a time, through the real command line: the message names it, and nothing is started."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from async_rl.shared.locks.run_lock import LAUNCHER_LOCK_FILE, lock_run
from deploy.local.run import main
from tests.support import ROOT

CONFIG = """
[run]
dir = "runs/one"
[model]
path = "model"
[prompts]
source = "rows.jsonl"
prompts_per_batch = 4
max_prompt_tokens = 64
[rollout]
max_response_tokens = 24
[reward]
name = "python:reward.py:score"
[train]
iterations = 3
"""
REWARD = "def score(prompt, responses, row):\n    return [0.0 for _ in responses]\n"
VLLM = ("--inference.engine", "vllm")


@dataclass(frozen=True)
class Mistake:
    """Words added to the command, files that replace sound ones, and what the message must name."""

    words: tuple[str, ...] = ()
    files: dict[str, str | None] = field(default_factory=dict)
    says: tuple[str, ...] = ()


def rows(*values: object, column: str = "prompt") -> str:
    return "".join(json.dumps({column: value}) + "\n" for value in values)


def config_with(section: str, line: str) -> str:
    return CONFIG.replace(f"[{section}]", f"[{section}]\n{line}")


MISTAKES = {
    "no config": Mistake(files={"run.toml": None}, says=("cannot read the config 'run.toml'", "path of a TOML file")),
    "config is no TOML": Mistake(files={"run.toml": "[run\n"}, says=("'run.toml' is not valid TOML", "line 1")),
    "config is no text": Mistake(files={"run.toml": "\udcff"}, says=("'run.toml' is not valid TOML",)),
    "missing section": Mistake(
        files={"run.toml": CONFIG.replace("[train]\niterations = 3", "")},
        says=("train.iterations and train.epochs are both missing: set one of them",),
    ),
    "missing key": Mistake(
        files={"run.toml": CONFIG.replace('path = "model"', "")},
        says=("missing key 'model.path'", "--model.path VALUE"),
    ),
    "misspelt key": Mistake(
        files={"run.toml": config_with("train", "iteratons = 4")},
        says=("unknown key 'train.iteratons' (value 4)", "did you mean 'train.iterations'?", "[train] has iterations,"),
    ),
    "key in a wrong section": Mistake(
        files={"run.toml": config_with("train", "learning_rate = 4")}, says=("did you mean 'optimizer.learning_rate'?",)
    ),
    "misspelt section": Mistake(
        files={"run.toml": CONFIG + "[optimiser]\neps = 1"}, says=("unknown key 'optimiser'", "the sections are run,")
    ),
    "misspelt key of a set": Mistake(
        ("--evaluation.sets", '[{"nmae": "a", "source": "rows.jsonl"}]'),
        says=("unknown key 'evaluation.sets.0.nmae'", "did you mean 'name'?", "each of evaluation.sets has name,"),
    ),
    "misspelt option": Mistake(
        ("--train.iteratons", "4"), says=("'train.iteratons': did you mean 'train.iterations'?",)
    ),
    "option of a misspelt section": Mistake(("--trian.iterations", "4"), says=("unknown key 'trian",)),
    "option without a value": Mistake(("--train.iterations",), says=("--train.iterations has no value", "INT")),
    "no number": Mistake(("--train.iterations", "many"), says=("train.iterations: ", "valid integer", "'many'")),
    "out of range": Mistake(
        ("--train.iterations", "0"), says=("train.iterations: ", "greater than or equal to 1", "0")
    ),
    "an infinite learning rate": Mistake(
        ("--optimizer.learning_rate", "inf"), says=("optimizer.learning_rate: ", "finite number", "inf")
    ),
    "a wait without end": Mistake(
        files={"run.toml": config_with("reward", "timeout_s = inf")}, says=("reward.timeout_s: ", "finite number")
    ),
    "a seed beyond 64 bits": Mistake(("--run.seed", str(10**20)), says=("run.seed: ", "less than 9223372036854775808")),
    "a truth value for a number": Mistake(
        ("--train.iterations", "true"), says=("train.iterations: Input should be a number, not a truth value",)
    ),
    "a run nowhere": Mistake(("--run.dir", ""), says=("run.dir: Input should be a path, not empty text",)),
    "a run where none can be": Mistake(("--run.dir", "/proc/none"), says=("run.dir '/proc/none' cannot be made",)),
    "a name without a port": Mistake(
        ("--pool.instances", '["dns:instances"]'), says=("pool.instances: ", "dns:HOST:PORT", "'dns:instances'")
    ),
    "none of the choices": Mistake(("--train.order", "random"), says=("train.order: ", "'completion' or 'prompt'")),
    "no model": Mistake(
        ("--model.path", "./none"), says=("model.path './none' does not exist", "checkpoint directory")
    ),
    "no model of the hub": Mistake(
        ("--model.path", "none/at-all"), says=("model.path 'none/at-all' is neither a directory nor",)
    ),
    "model without config": Mistake(files={"model/config.json": None}, says=("model.path 'model' has no config.json",)),
    "broken model config": Mistake(files={"model/config.json": "{"}, says=("model.path 'model'", "cannot be read")),
    "model of another family": Mistake(
        files={"model/config.json": '{"model_type": "gemma2"}'}, says=("model_type 'gemma2'", "expected one of qwen3")
    ),
    "model without tokenizer": Mistake(
        files={"model/tokenizer.json": None, "model/tokenizer_config.json": None},
        says=("model.path 'model' has no tokenizer", "save_pretrained"),
    ),
    "model without weights": Mistake(files={"model/model.safetensors": None}, says=("has no *.safetensors",)),
    "no chat template": Mistake(
        files={"model/chat_template.jinja": None},
        says=("prompts.chat_template is true", "set prompts.chat_template = false"),
    ),
    "too long for the model": Mistake(
        ("--prompts.max_prompt_tokens", "240"),
        says=(
            "prompts.max_prompt_tokens = 240 and rollout.max_response_tokens = 24",
            "264 tokens, more than the model's 256 positions",
            "lower prompts.max_prompt_tokens to at most 232",
        ),
    ),
    "responses too long": Mistake(
        ("--rollout.max_response_tokens", "256"), says=("lower rollout.max_response_tokens below 256",)
    ),
    "no such stop token": Mistake(("--rollout.stop", "[1, 9999]"), says=("rollout.stop is [1, 9999]", "0 to 95")),
    "no data": Mistake(
        ("--prompts.source", "no.jsonl"), says=("prompts.source 'no.jsonl' cannot be read", "check the")
    ),
    "data of another kind": Mistake(
        ("--prompts.source", "a.tsv"), says=("'a.tsv': expected a .jsonl, .json, .csv or .parquet file",)
    ),
    "broken line": Mistake(files={"rows.jsonl": rows("a") + "{\n"}, says=("rows.jsonl, line 2 is not JSON",)),
    "broken Parquet": Mistake(
        ("--prompts.source", "r.parquet"), {"r.parquet": "x"}, says=("r.parquet is not a Parquet file",)
    ),
    "no such column": Mistake(
        ("--prompts.columns.prompt", "q"), says=("no value in column 'q' (it has ['prompt'])", "set prom")
    ),
    "prompts that are no text": Mistake(files={"rows.jsonl": rows(1, 2, 3, 4)}, says=("row 0: column 'prompt' is 1",)),
    "messages without a template": Mistake(
        ("--prompts.chat_template", "false"),
        {"rows.jsonl": rows([{"role": "user", "content": "x"}])},
        says=("row 0: column 'prompt' is list, expected text", "prompts.chat_template = true"),
    ),
    "a task that does not exist": Mistake(
        ("--prompts.source", "reasoning-gym:spell_backwards"),
        says=("prompts.source 'reasoning-gym:spell_backwards' with", "spell_backwards"),
    ),
    "options that a task does not have": Mistake(
        ("--prompts.source", "reasoning-gym:spell_backward", "--prompts.task_options", "{min_word_length = 3}"),
        says=("prompts.source 'reasoning-gym:spell_backward' with prompts.task_options", "min_word_length"),
    ),
    "too few rows": Mistake(
        files={"rows.jsonl": rows("a", "b")}, says=("has 2 rows, fewer than prompts.prompts_per_batch = 4",)
    ),
    "no rows": Mistake(files={"rows.jsonl": ""}, says=("prompts.source 'rows.jsonl' has no rows",)),
    "a batch too small for the replicas": Mistake(
        ("--trainer.num_processes", "5"), says=("prompts.prompts_per_batch is 4, but there are 5 replicas",)
    ),
    "a layout that does not divide": Mistake(
        ("--trainer.num_processes", "3", "--trainer.tensor_parallel", "2"),
        says=("3 training ranks", "start a multiple"),
    ),
    "a layout that the model does not divide into": Mistake(
        ("--trainer.tensor_parallel", "3"),
        says=("trainer.tensor_parallel = 3 does not divide the model's 4 attention",),
    ),
    "no reward": Mistake(
        ("--reward.name", "bleu"), says=("reward.name is 'bleu': expected math, multiple_choice, exact,",)
    ),
    "no reward file": Mistake(files={"reward.py": None}, says=("reward.name is 'python:reward.py:score'", "no file")),
    "no reward function": Mistake(
        ("--reward.name", "python:reward.py:scores"), says=("has no function 'scores'; it has ['score']",)
    ),
    "reward with a syntax error": Mistake(
        files={"reward.py": "\n" + REWARD.replace(":", "")},
        says=("reward.py, line 2: expected ':'", "correct the file"),
    ),
    "reward that needs what is not there": Mistake(
        files={"reward.py": "import json\nimport no_such_package\n" + REWARD},
        says=("reward.py, line 2: there is no module 'no_such_package'", "install it"),
    ),
    "a set without data": Mistake(
        ("--evaluation.sets", '[{name = "held-out", source = "none.jsonl"}]'),
        says=("evaluation set 'held-out': prompts.source 'none.jsonl' cannot be read",),
    ),
    "two sets of one name": Mistake(
        ("--evaluation.sets", '[{name = "a", source = "rows.jsonl"}, {name = "a", source = "rows.jsonl"}]'),
        says=("evaluation.sets have the names ['a', 'a']: give each a name of its own",),
    ),
    "records of another run": Mistake(
        files={"runs/one/ledger.jsonl": "{}\n"}, says=("run.dir 'runs/one' holds the records of", "run.resume = true")
    ),
    "run.dir is a file": Mistake(files={"runs/one": "x"}, says=("run.dir is 'runs/one', but 'runs/one' is a file",)),
    "snapshots below a file": Mistake(
        ("--publish.snapshot_dir", "run.toml/x"), says=("publish.snapshot_dir is 'run.toml/x'", "run.toml' is a file")
    ),
    "options of vLLM for the embedded engine": Mistake(
        ("--inference.engine_options", '["--seed=3"]'),
        says=("inference.engine_options is [\"--seed=3\"] and has no effect here: set inference.engine to 'vllm'",),
    ),
    "workers of the embedded engine": Mistake(
        ("--inference.tensor_parallel", "2"), says=("inference.tensor_parallel is 2", "inference.engine to 'vllm'")
    ),
    "instances of one's own": Mistake(
        ("--pool.instances", '["http://a:1"]'),
        says=("pool.instances is ['http://a:1']", "torchrun -m async_rl.trainer"),
    ),
    "no Python for vLLM": Mistake(
        (*VLLM, "--inference.python", "no/python"), says=("inference.python is 'no/python'", "make vllm")
    ),
    "a Python without vLLM": Mistake(
        (*VLLM, "--inference.python", sys.executable), says=("inference.engine is 'vllm'", "this Python has no vLLM")
    ),
    "a program that is no Python": Mistake(
        (*VLLM, "--inference.python", "echo"),
        says=("inference.engine is 'vllm' with inference.python = 'echo', which is no Python with", "make vllm"),
    ),
    "a file that is no program": Mistake(
        (*VLLM, "--inference.python", "./python"),
        files={"python": "print(1)\n"},
        says=("inference.python = './python', which cannot be started (Exec format error)", "make vllm"),
    ),
    "no devices": Mistake(
        ("--trainer.device", "cuda"),
        says=("needs 2 devices: trainer.num_processes = 1", "there are none", "nvidia-smi"),
    ),
    "the embedded engine on an NPU": Mistake(("--trainer.device", "npu"), says=("set inference.engine to 'vllm'",)),
}

ASKED = (
    "a Python without vLLM",
    "a program that is no Python",
    "a file that is no program",
    "no devices",
    "the embedded engine on an NPU",
)
"""Another program has to be asked whether these are mistakes."""


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which `run.toml` would run; signals' handlers are as before afterwards."""
    shutil.copytree(tiny_model("qwen3", tied=True), tmp_path / "model")
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text(rows(*"abcdef"))
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def records(workplace: Path) -> dict[Path, bytes]:
    """What is in the folder of the runs."""
    return {path: path.read_bytes() for path in (workplace / "runs").rglob("*") if path.is_file()}


def make(workplace: Path, mistake: Mistake) -> None:
    for name, content in mistake.files.items():
        path = workplace / name
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, errors="surrogateescape")
            path.chmod(0o755 if name == "python" else 0o644)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.distributed) if name in ASKED else name for name in MISTAKES]
)
def test_a_mistake_is_named_before_anything_starts(
    workplace: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    make(workplace, mistake)
    before = records(workplace)
    try:
        code = main(["run.toml", *mistake.words])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2, said
    for part in mistake.says:
        assert part in said
    assert "Traceback" not in said and 'File "' not in said, said
    assert not (workplace / "runs" / "one" / "logs").exists(), "a process was started"
    assert records(workplace) == before


def test_a_second_one_in_a_directory_is_refused_and_leaves_it_as_it_is(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first one's start on, before its trainer holds anything."""
    run_dir = workplace / "runs" / "one"
    run_dir.mkdir(parents=True)
    with lock_run(run_dir, LAUNCHER_LOCK_FILE):
        assert main(["run.toml"]) == 1
    assert "is in use by another run" in capsys.readouterr().err
    assert [path.name for path in run_dir.iterdir()] == [LAUNCHER_LOCK_FILE]


def test_all_that_is_wrong_is_said_at_once(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--prompts.source",
        "none.jsonl",
        "--reward.name",
        "python:none.py:f",
        "--rollout.max_response_tokens",
        "999",
    )
    assert main(["run.toml", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("ConfigError") == 1
    assert all(part in said for part in ("none.jsonl", "none.py", "256 positions"))


PROCESSES = {
    "run": (["deploy.local.run", "run.toml", "--prompts.source", "none.jsonl"], "prompts.source 'none.jsonl'"),
    "trainer": (["trainer", "run.toml", "--prompts.source", "none.jsonl"], "prompts.source 'none.jsonl'"),
    "torchrun": (
        ["torch.distributed.run", "--standalone", "-m", "async_rl.trainer", "run.toml", "--reward.name=python:no.py:f"],
        "reward.name is 'python:no.py:f'",
    ),
    "eval": (
        [
            *("deploy.local.evaluate", "--max-tokens", "9", "--prompts.max_prompt_tokens=9", "model"),
            *("--data", "no.jsonl", "--reward", "math"),
        ],
        "no.jsonl' cannot be read",
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", PROCESSES)
def test_every_program_says_it_in_one_message(workplace: Path, name: str) -> None:
    words, message = PROCESSES[name]
    if name == "torchrun":
        (workplace / "trainer.py").write_text("print('a script of the user')\n")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    if name == "torchrun":
        # torchrun has an exit code and lines of its own; the message comes first, and its report ends with it.
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        first = next(line for line in lines if message in line)
        assert "ConfigError" in first and lines.index(first) < 3
        assert message in done.stderr[done.stderr.index("Root Cause") :]
        return
    assert done.returncode == 2, done.stderr
    assert "ConfigError: " in done.stderr and message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.distributed
def test_a_dry_run_prints_the_plan_and_starts_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "run.toml", "--inference.num_instances", "2"]) == 0
    shown = capsys.readouterr().out
    names = [line for line in shown.splitlines() if line.startswith(("  instance-", "  trainer")) and "." not in line]
    assert names == ["  instance-0", "  instance-1", "  trainer"]
    assert "-m inference_service --engine transformers --model model" in shown
    assert "-m async_rl.trainer run.toml --inference.num_instances=2" in shown
    assert not (workplace / "runs").exists()


def test_a_dry_run_says_what_is_wrong_after_the_plan(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "rows.jsonl").write_bytes(b"\xff\xfe")
    assert main(["--dry-run", "run.toml", "--reward.name", "python:none.py:score"]) == 2
    shown, said = capsys.readouterr()
    assert "-m async_rl.trainer run.toml" in shown
    assert "there is no file 'none.py'" in said and "rows.jsonl, line 1 is not UTF-8 text" in said
