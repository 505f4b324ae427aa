"""`async-rl eval --harness`: lm-eval's figures are those that transformers gives for the same tasks."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.errors import ConfigError
from async_rl.shared.programs import extras
from deploy.local.evaluate import main
from deploy.local.evaluate_options import config_path, parse

TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = 'task: my_choice\noutput_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
TEXT = """task: my_text
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [STOP], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOICES = ["abc", "d e", "fghij"]
QUESTIONS = [f"Word {i} {'of many ' * (i % 3)}:" for i in range(8)]

lm_eval = pytest.mark.skipif(
    any(extras.find_spec(module) is None for module in extras.MODULES["harness"]),
    reason="needs the extra harness: `make test-harness`",
)


def write_tasks(folder: Path, stop: str = "e", answer: str = "x") -> Path:
    data = folder / "rows.jsonl"
    rows = [{"question": q, "choices": CHOICES, "gold": i % 3, "answer": answer} for i, q in enumerate(QUESTIONS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "choice.yaml").write_text(CHOICE + TASK.format(data=data))
    (tasks / "text.yaml").write_text(TEXT.replace("STOP", json.dumps(stop)) + TASK.format(data=data))
    return tasks


def evaluate(model: Path, tasks: Path, names: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "deploy.local.evaluate", str(model), "--harness", names]
    command += ["--harness-tasks", str(tasks), "--max-tokens", "16", *options]
    # Data sets' own cache is in the home directory.
    environment = {**os.environ, "HF_HOME": str(tasks.parent / "hub"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def samples(folder: Path, task: str) -> list[Any]:
    (path,) = folder.glob(f"*/samples_{task}_*.jsonl")
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["doc_id"])


def greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    tokens = model.generate(input_ids=ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@lm_eval
@pytest.mark.distributed
def test_choices_and_texts_are_those_of_transformers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    whole = [greedy(model, tokenizer, question) for question in QUESTIONS]
    # One that is in some of the texts, and at their third character in one.
    stop = whole[0][2]
    texts = [text.split(stop)[0] for text in whole]
    tasks = write_tasks(tmp_path, stop, texts[0])
    out = tmp_path / "out"
    done = evaluate(path, tasks, "my_choice,my_text", "--num-instances", "2", "--out", str(out), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (written,) = out.glob("*/results_*.json")
    assert json.loads(written.read_text())["results"] == found["results"]

    likeliest = []
    for question, sample in zip(QUESTIONS, samples(out, "my_choice"), strict=True):
        context = tokenizer(question, add_special_tokens=False).input_ids
        sums = []
        for choice in CHOICES:
            ids = torch.tensor([*context, *tokenizer(f" {choice}", add_special_tokens=False).input_ids])
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])
            sums.append(float(logprobs[len(context) - 1 :].sum()))
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(sums, abs=1e-3)
        likeliest.append(sums.index(max(sums)))
    right = [choice == i % 3 for i, choice in enumerate(likeliest)]
    assert found["results"]["my_choice"]["acc,none"] == sum(right) / len(right)
    assert found["results"]["my_choice"]["acc_stderr,none"] > 0 or len(set(right)) == 1

    assert [sample["resps"][0][0] for sample in samples(out, "my_text")] == texts
    assert found["results"]["my_text"]["exact_match,none"] == sum(t == texts[0] for t in texts) / len(texts) > 0
    assert "my_choice" in done.stdout and "standard error" in done.stdout


@lm_eval
@pytest.mark.distributed
def test_repeated_samples_of_a_row_differ(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    text = (tasks / "text.yaml").read_text().replace("do_sample: false", "do_sample: true, temperature: 1.0")
    (tasks / "text.yaml").write_text(text.replace('["e"]', '[""]') + "repeats: 4\n")
    done = evaluate(tiny_model(), tasks, "my_text", "--limit", "2", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    for sample in samples(tmp_path / "out", "my_text"):
        assert len(set(sample["resps"][0])) > 1, sample["resps"]


@lm_eval
@pytest.mark.nightly
@pytest.mark.distributed
def test_adapters_and_chat_templates_are_applied(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model()), AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if "lora_B" in name:
                factor.normal_(0, 0.5)
    adapted.save_pretrained(tmp_path / "adapters")
    tasks = write_tasks(tmp_path)
    words = ("--base", str(base), "--apply-chat-template", "--limit", "3", "--out", str(tmp_path / "out"))
    done = evaluate(tmp_path / "adapters", tasks, "my_text", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = samples(tmp_path / "out", "my_text")
    prompts = [sample["arguments"]["gen_args_0"]["arg_0"] for sample in found]
    assert prompts == [f"<user> {question} " for question in QUESTIONS[:3]]
    texts = [greedy(adapted, tokenizer, prompt).split("e")[0] for prompt in prompts]
    assert [sample["resps"][0][0] for sample in found] == texts
    (base / "chat_template.jinja").unlink()
    done = evaluate(base, tasks, "my_text", "--apply-chat-template")
    assert done.returncode == 2 and "has no chat template" in done.stderr, done.stderr


@lm_eval
@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_choise", "no task of lm-eval; near it is my_choice"),
        ("humaneval", "without a sandbox|cannot load it"),
        ("broken", "lm-eval cannot load it"),
    ],
)
def test_a_task_that_cannot_run_is_named_before_instances_start(
    tiny_model: Callable[..., Path], tmp_path: Path, name: str, message: str
) -> None:
    tasks = write_tasks(tmp_path)
    (tasks / "broken.yaml").write_text("task: broken\n" + TASK.format(data="/none.jsonl"))
    path = tmp_path / "run.toml"
    path.write_text(
        f"[run]\ndir = '{tmp_path / 'run'}'\n[model]\npath = '{tiny_model()}'\n"
        "[prompts]\nsource = 'x.jsonl'\nprompts_per_batch = 1\nchat_template = false\nmax_prompt_tokens = 99\n"
        "[rollout]\nmax_response_tokens = 16\n[reward]\nname = 'exact'\n[train]\niterations = 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "deploy.local.evaluate", str(path), "--harness", name, "--harness-tasks", str(tasks)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
    assert [log.name for log in (tmp_path / "run" / "logs").iterdir()] == ["evaluation.log"]


def test_a_missing_extra_is_named(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(extras.MODULES, "harness", ("no_such_module",))
    assert main([str(tiny_model()), "--harness", "gsm8k"]) == 2
    assert "install 'async-rl[harness]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--harness", "gsm8k", "--reward", "math"], "--reward stands beside --harness, whose tasks have that"),
        (["--harness", "gsm8k", "--top-p", "0.5"], "--top-p stands beside --harness"),
        (["--data", "x.jsonl", "--limit", "5"], "--limit is for --harness: name its tasks, or leave --limit out"),
        (["--harness", "gsm8k", "--limit", "0"], "--limit is 0: expected a number of rows from 1 on"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(words: list[str], message: str) -> None:
    for model in ("model", "run.toml"):
        with pytest.raises(ConfigError, match=message):
            config_path(parse([model, *words])[0])
