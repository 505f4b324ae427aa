"""The command: what it prints, its exit codes, and bad input, which is refused by name."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.errors import ConfigError
from async_rl.shared.net.free_ports import free_ports
from tests.support.audit_faults import save_adapter
from tests.support.audited_engine import audited_engine, with_config
from tests.support.waiting import wait_for
from trainer.audit.__main__ import main
from trainer.audit.audit import audit, update
from trainer.audit.given import Options

TinyModel = Callable[..., Path]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "trainer.audit", *words], capture_output=True, text=True, timeout=250)


@pytest.mark.distributed
def test_the_command_says_what_holds_and_what_does_not_and_ends_with_1(tiny_model: TinyModel) -> None:
    with audited_engine(tiny_model("qwen3"), "--logprobs-mode", "raw_logprobs") as url:
        other = run("--engine", url, "--checkpoint", str(tiny_model("qwen3")), "--json")
    assert other.returncode == 1, other.stderr
    found = json.loads(other.stdout)
    assert found["holds"] is False and found["route"] == "/inference/v1/generate"
    assert [f["cause"] for f in found["findings"] if f["outcome"] == "fails"] == ["raw log-probs"]
    assert "log-probs at temperature 1" in [f["check"] for f in found["findings"] if f["outcome"] == "holds"]


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_sound_engine_is_exit_code_0_and_one_that_is_not_there_2(tiny_model: TinyModel) -> None:
    model = str(tiny_model("qwen3"))
    with audited_engine(Path(model)) as url:
        sound = run("--engine", url, "--checkpoint", model)
    assert sound.returncode == 0 and "log-probs at temperature 0.7: holds" in sound.stdout, sound
    gone = run("--engine", f"http://127.0.0.1:{free_ports(1)[0]}", "--checkpoint", model)
    assert gone.returncode == 2 and "check --engine" in gone.stderr


@pytest.mark.distributed
def test_a_checkpoint_or_adapters_that_are_of_no_use_are_refused_by_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    save_adapter(tiny_model("llama"), tmp_path / "of another model")
    for name, changes in {"of another form": {"use_rslora": True}, "of another rank": {"r": 1}, "cut": {}}.items():
        save_adapter(model, tmp_path / name)
        config = tmp_path / name / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    (tmp_path / "cut" / "adapter_model.safetensors").unlink()
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint": str(tmp_path / "none")}, "does not exist"),
        ({"checkpoint": str(bare)}, "has no"),
        ({"adapter": bare}, "adapter_config.json"),
        ({"adapter": tmp_path / "of another model"}, "another model's"),
        ({"adapter": tmp_path / "of another form"}, "has use_rslora = True: only False is held"),
        ({"adapter": tmp_path / "of another rank"}, "its rank r is 1: these adapters are another model's"),
        ({"adapter": tmp_path / "cut"}, "no such file"),
        ({"before": tiny_model("qwen3", num_hidden_layers=1)}, "older checkpoint of the same model"),
        ({"before": tiny_model("qwen3", vocab_size=128)}, r"of shape \[128, 32\], and --checkpoint \[96, 32\]"),
        ({"before": tmp_path / "of another model"}, "give the new ones as --adapter"),
        ({"checkpoint": str(with_config(model, tmp_path / "biased", attention_bias=True))}, "others that its config"),
        ({"update_via": "false"}, "exit code 1, expected 0"),
    ]
    with audited_engine(model) as url:
        for changes, message in cases:
            with pytest.raises(ConfigError, match=message):
                audit(Options(**{"engine": url, "checkpoint": str(model), **changes}))


@pytest.mark.distributed
def test_whatever_goes_wrong_the_exit_code_accuses_no_engine(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("qwen3")
    template = with_config(model, tmp_path / "template")
    (template / "chat_template.jinja").write_text("{% for message in")
    with audited_engine(model) as url:
        for checkpoint, said in (
            (template, "ConfigError: --checkpoint .* has a chat template that does not render"),
            # torch refuses it by an assertion.
            (with_config(model, tmp_path / "padded", pad_token_id=10**9), "AssertionError: Padding_idx"),
        ):
            assert main(["--engine", url, "--checkpoint", str(checkpoint), "--json"]) == 2
            shown = capsys.readouterr()
            assert re.search(said, shown.err) and shown.out == ""


@pytest.mark.distributed
def test_a_command_of_an_update_that_fails_or_hangs_is_refused_in_time(tmp_path: Path) -> None:
    mark = tmp_path / "lived"
    for command, message in (
        ("no-such-program", "cannot be run"),
        ("", "cannot be run"),
        ("sh -c 'echo out of memory; exit 3'", "exit code 3, expected 0"),
        (f"sh -c 'sleep 1; touch {mark}'", "has not ended after 0.3 s"),
    ):
        with pytest.raises(ConfigError, match=message):
            update(command, 0.3 if "sleep" in command else 20.0)
    left = tmp_path / "left"
    update(f"sh -c '(sleep 3; touch {left}) &'", 20.0)
    assert not mark.exists() and not left.exists(), "an engine that it starts again may go on"
    wait_for(left.exists)


@pytest.mark.distributed
@pytest.mark.parametrize("as_json", [True, False])
def test_findings_that_nobody_reads_accuse_no_engine(
    as_json: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("qwen3"))
    reader, writer = os.pipe()
    os.close(reader)
    with audited_engine(Path(model)) as url, capsys.disabled():
        unread = os.fdopen(writer, "w")
        said = io.StringIO()
        monkeypatch.setattr(sys, "stdout", unread)
        monkeypatch.setattr(sys, "stderr", said)
        code = main(["--engine", url, "--checkpoint", model, *(["--json"] if as_json else [])])
        monkeypatch.undo()
    with suppress(BrokenPipeError):
        unread.close()
    assert code == 2 and "cannot be written to standard output" in said.getvalue(), said.getvalue()


@pytest.mark.distributed
def test_a_log_on_a_full_disk_accuses_no_engine(tiny_model: TinyModel) -> None:
    words = ["--engine", f"http://127.0.0.1:{free_ports(1)[0]}", "--checkpoint", str(tiny_model("qwen3"))]
    with Path("/dev/full").open("w") as full:
        gone = subprocess.run([sys.executable, "-m", "trainer.audit", *words], stderr=full, timeout=250)
    assert gone.returncode == 2


@pytest.mark.distributed
def test_the_command_of_an_update_ends_with_its_audit(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, begun = str(tiny_model("qwen3")), tmp_path / "begun"
    command = f"sh -c 'echo $$ > {begun}.new; mv {begun}.new {begun}; sleep 100'"
    with audited_engine(Path(model)) as url:
        words = ["--engine", url, "--checkpoint", model, "--update-via", command]
        process = subprocess.Popen([sys.executable, "-m", "trainer.audit", *words])
        wait_for(begun.exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    wait_for(lambda: not psutil.pid_exists(int(begun.read_text())))
