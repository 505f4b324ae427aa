"""`async-rl check`: sources, forecast, and what is wrong; for a forecast a config.json alone is enough."""

import io
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from async_rl.checks.forecast.run_forecast import forecast_run
from async_rl.checks.preflight.adapter import factor_shapes
from async_rl.checks.preflight.model import read_shape
from async_rl.config.file import load_config
from async_rl.errors import ConfigError
from deploy.local import torch_build
from deploy.local.check import check_run, main
from deploy.local.machine_memory import HostMemory, device_memory, host_memory
from deploy.local.memory_fit import GIB, Capacity, find_misfits

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
name = "exact"
[train]
iterations = 3
"""
RANK_4 = "--adapter.rank=4"
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_model("qwen3", tied=True), tmp_path / "model")
    (tmp_path / "run.toml").write_text(CONFIG)
    rows = ({"prompt": letter, "answer": letter} for letter in "abcdef")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.distributed
def test_a_config_that_can_run_is_shown_with_sources_and_forecast(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_RL_TOKEN", "hidden-token")
    begun_s = time.process_time()
    assert main(["run.toml", "--inference.num_instances", "2", "--cluster.env.MY_SECRET", "hidden-word"]) == 0
    # It does not import torch, which alone takes longer than this on slow machines.
    assert time.process_time() - begun_s < 10
    shown = capsys.readouterr().out
    assert "run.toml:15" in shown and "command line" in shown
    assert "-m async_rl.trainer run.toml --inference.num_instances=2" in shown
    assert "instance-0" in shown and "instance-1" in shown
    assert "memory of each training rank, of 1" in shown and "memory of each instance, of 2" in shown
    assert "up to 768 sampled" in shown  # 4 prompts x 8 responses x 24 tokens
    assert "hidden" not in shown and "***" in shown
    assert not (workplace / "runs").exists()


@pytest.mark.distributed
def test_the_last_line_is_a_verdict_and_defaults_are_shown_on_request(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run.toml"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "verdict: this config can run here: async-rl run"
    assert "prompts.source" in shown and "train.logprob_noise" not in shown and "more have their defaults" in shown
    assert main(["run.toml", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "train.logprob_noise" in shown and "default" in shown and "more have their defaults" not in shown
    assert main(["run.toml", "--elsewhere"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: this config can run where it is meant to"
    (workplace / "model" / "model.safetensors").unlink()
    assert main(["run.toml"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "verdict: this config is sound, but cannot run yet: files are missing; 1 warning above"
    for words in (["--prompts.source", "none.jsonl"], ["--train.iteratoins", "3"]):
        try:
            assert main(["run.toml", *words]) == 2
        except SystemExit:
            continue
        assert capsys.readouterr().err.splitlines()[-1].startswith("verdict: this config cannot run")


def test_config_json_alone_gives_the_forecast_of_a_published_size(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(workplace / "model")
    (workplace / "model").mkdir()
    (workplace / "model" / "config.json").write_text(json.dumps(QWEN3_8B))
    words = ["--trainer.device", "npu", "--trainer.num_processes", "8", "--trainer.tensor_parallel", "4"]
    words += ["--inference.engine", "vllm", "--inference.tensor_parallel", "4", "--inference.num_instances", "2"]
    words += ["--model.dtype", "bfloat16"]
    assert main(["run.toml", "--elsewhere", *words]) == 0
    shown = capsys.readouterr().out
    assert "8,190,735,360 parameters" in shown
    assert (
        "warning: the run cannot start yet: model.path 'model' has no *.safetensors" in shown
        and "has no tokenizer" in shown
    )


def test_the_largest_deepseek_is_planned_from_its_config_alone(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published, in fp8, with a layer for multi-token prediction."""
    shutil.rmtree(workplace / "model")
    (workplace / "model").mkdir()
    (workplace / "model" / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    words = ["--trainer.device", "npu", "--trainer.num_processes", "192", "--trainer.tensor_parallel", "4"]
    words += ["--trainer.pipeline_parallel", "6", "--trainer.expert_parallel", "16", "--trainer.recompute", "full"]
    words += ["--inference.engine", "vllm", "--inference.tensor_parallel", "16", "--model.dtype", "bfloat16"]
    words += ["--prompts.prompts_per_batch", "8", "--pool.instances", '["http://host:1"]']
    assert main(["run.toml", "--elsewhere", *words]) == 0
    shown = capsys.readouterr().out
    # 671B, of which 37B are active (arXiv 2412.19437); the biases of 58 routers are no parameters.
    assert f"{671_026_419_200 - 58 * 256:,} parameters, 37,552,282,624 used by a token" in shown
    assert "memory of each training rank, of 192" in shown
    # 16 of 256 experts in each of at most 11 layers, and a quarter of what tensor parallelism divides.
    experts = 11 * 256 * 3 * 7168 * 2048 // 16
    match = re.search(r"weights +[\d.,]+ GiB +([\d,]+) parameters on this rank", shown)
    assert match is not None and experts < int(match[1].replace(",", "")) < 1.3 * experts, shown
    assert main(["run.toml", "--elsewhere", *words[:-2]]) == 2
    assert "is in fp8" in capsys.readouterr().err


# It asks torch, in a process of its own.
@pytest.mark.distributed
def test_devices_that_are_missing_here_are_an_error_unless_it_runs_elsewhere(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trainer.device", "npu", "--inference.engine", "vllm"]
    assert main(["run.toml", *words, "--elsewhere"]) == 0
    assert main(["run.toml", *words]) == 2
    assert "this run needs 2 devices" in capsys.readouterr().err


def test_other_hosts_are_planned_as_tasks(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run.toml", "--cluster.training_nodes", "2", "--prompts.source", "elsewhere.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "producer x 1" in shown and "fleet endpoint 8600; for the ranks a free one" in shown
    assert "training node x 2" in shown and "start it with async-rl launch" in shown
    assert "warning: on this machine: 'elsewhere.jsonl'" in shown or "elsewhere.jsonl" in shown
    assert main(["run.toml", "--pool.instances", '["http://host:1"]']) == 0
    assert "its instances run elsewhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts.source", "none.jsonl"], "none.jsonl"),
        (["--reward.name", "python:none.py:score"], "there is no file 'none.py'"),
        (["--model.path", "nowhere/at/all"], "nowhere/at/all"),
        (["--trainer.tensor_parallel", "3", "--prompts.prompts_per_batch", "6"], "does not divide"),
        (
            ["--trainer.micro_batch_tokens", str(10**9), "--prompts.prompts_per_batch", str(10**7)],
            "of this host's memory",
        ),
        (["--algorithm.name", "sapo", "--algorithm.options.tau", "1"], "algorithm.options.tau: Extra inputs"),
        (["--algorithm.name", "ppo", "--algorithm.scale_by_std", "true"], "does not use algorithm.scale_by_std"),
        (["--algorithm.kl_coef", "nan"], "algorithm.kl_coef"),
        (["--prompts.prompts_per_batch", "0"], "prompts.prompts_per_batch"),
    ],
)
def test_what_cannot_run_is_named_and_fails(
    words: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run.toml", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_a_damaged_model_config_is_an_error_and_no_forecast(workplace: Path) -> None:
    path = workplace / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": None}))
    config = load_config(Path("run.toml"))
    check = check_run(Path("run.toml"), config, (), elsewhere=False)
    assert check.forecast is None and "hidden_size = None" in str(check.errors[0])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        # No number of another type is one to transformers.
        (
            "rms_norm_eps",
            1,
            "transformers does not read, and so no instance: Validation error for field 'rms_norm_eps'",
        ),
        ("vocab_size", 3, "vocab_size = 3 and hidden_size = 32 in its config.json and an embedding of [96, 32]"),
    ],
)
def test_a_model_that_instances_or_trainer_do_not_load_is_an_error(
    workplace: Path, key: str, value: object, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = workplace / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert main(["run.toml"]) == 2
    said = capfd.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize("placement", ["shared", "turns"])
def test_both_pools_on_one_device_are_for_one_host(
    workplace: Path, placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--run.placement={placement}", "--publish.transport=snapshot", "--publish.snapshot_dir=weights"]
    assert main(["run.toml", *words, "--elsewhere"]) == 0
    capsys.readouterr()
    assert main(["run.toml", *words, "--cluster.training_nodes=2"]) == 2
    assert f"run.placement is '{placement}', but a cluster's launcher" in capsys.readouterr().err


def test_memory_that_others_use_is_a_warning_and_missing_memory_an_error(workplace: Path) -> None:
    config = load_config(Path("run.toml"))
    forecast = forecast_run(config, read_shape("model"))
    assert find_misfits(config, forecast, Capacity(HostMemory(64 * GIB, 64 * GIB), None)).errors == ()
    (warning,) = find_misfits(config, forecast, Capacity(HostMemory(64 * GIB, 0), None)).warnings
    assert "0.0 GiB of 64.0 GiB are free" in warning
    (error,) = find_misfits(config, forecast, Capacity(HostMemory(1, 1), None)).errors
    assert isinstance(error, ConfigError) and "trainer.micro_batch_tokens" in str(error)
    on_device = find_misfits(config, forecast, Capacity(HostMemory(64 * GIB, 64 * GIB), 1))
    assert ["training rank" in str(error) for error in on_device.errors] == [True, False]


@pytest.mark.distributed
@pytest.mark.parametrize(("cuda", "refused"), [(None, True), ("13.0", False)])
def test_a_torch_for_cpus_beside_gpus_is_refused(
    cuda: str | None, refused: bool, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = workplace / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\n[ $1 = --list-gpus ] && printf 'GPU 0: X\nGPU 1: X\n' || printf '81920\n81920\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch_build, "cuda_of_torch", lambda: cuda)
    words = ["--trainer.device=cuda"]
    errors = check_run(Path("run.toml"), load_config(Path("run.toml"), words), words, elsewhere=False).errors
    assert [str(error) for error in errors if "is built for CPUs, and there are GPUs; pip install" in str(error)] == [
        str(error) for error in errors
    ]
    assert bool(errors) == refused


def test_of_adapters_the_factors_alone_have_gradients_and_moments(workplace: Path) -> None:
    shape = read_shape("model")
    whole, adapted = (load_config(Path("run.toml"), ["--algorithm.kl_coef=0.1", *words]) for words in ((), (RANK_4,)))
    parts, all_parts = (
        {part.name: part.num_bytes for part in forecast_run(config, shape).rank.resident} for config in (adapted, whole)
    )
    number = sum(prod(size) for size in factor_shapes(adapted.adapter, shape).values())
    assert (parts["adapters"], parts["gradients"], parts["optimizer"]) == (4 * number, 4 * number, 8 * number)
    assert parts["weights"] == all_parts["weights"] > parts["adapters"]
    assert "reference" in all_parts and "reference" not in parts, "the base is the reference"


def test_pools_that_share_a_device_fit_on_it_together(workplace: Path) -> None:
    shared = ["--run.placement=shared", "--publish.transport=snapshot", "--publish.snapshot_dir=/dev/shm/w"]
    words = ["--trainer.device=cuda", *shared]
    config = load_config(Path("run.toml"), words)
    forecast = forecast_run(config, read_shape("model"))
    host, both = HostMemory(64 * GIB, 64 * GIB), forecast.rank.num_bytes + forecast.instance.num_bytes
    assert find_misfits(config, forecast, Capacity(host, both)).errors == ()
    (error,) = find_misfits(config, forecast, Capacity(host, both - 1)).errors
    assert "a training rank and an instance need about" in str(error)
    # vLLM takes its share of the device, whatever the run needs.
    config = load_config(Path("run.toml"), [*words, "--inference.engine=vllm"])
    forecast = forecast_run(config, read_shape("model"))
    device = 4 * forecast.rank.num_bytes
    (error,) = find_misfits(config, forecast, Capacity(host, device)).errors
    assert "vLLM takes 90% of the device, of which a training rank needs 25%: add" in str(error)
    assert '"--gpu-memory-utilization", "0.75" or less' in str(error)
    words += ["--inference.engine=vllm", '--inference.engine_options=["--gpu-memory-utilization", "0.75"]']
    assert find_misfits(load_config(Path("run.toml"), words), forecast, Capacity(host, device)).errors == ()


def test_pools_that_take_turns_need_the_larger_one_and_the_base_of_the_other(workplace: Path) -> None:
    words = ["--trainer.device=cuda", "--publish.transport=snapshot", "--publish.snapshot_dir=/dev/shm/w"]

    def misfits(placement: str, device: int, *more: str) -> list[str]:
        config = load_config(Path("run.toml"), [*words, f"--run.placement={placement}", *more])
        capacity = Capacity(HostMemory(64 * GIB, 64 * GIB), device)
        return [
            str(error) for error in find_misfits(config, forecast_run(config, read_shape("model")), capacity).errors
        ]

    config = load_config(Path("run.toml"), [*words, "--run.placement=turns"])
    forecast = forecast_run(config, read_shape("model"))
    rank, instance = forecast.rank, forecast.instance
    needed = max(rank.num_bytes + instance.base_bytes, rank.base_bytes + instance.num_bytes)
    assert misfits("turns", needed) == []
    (error,) = misfits("turns", needed - 1)
    assert "a training rank and an instance, in turns, need about" in error
    # One that fits in turns only is told so.
    (error,) = misfits("shared", needed)
    assert "set run.placement to 'turns'" in error
    # Weights and optimizer wait on the host meanwhile.
    separate = load_config(Path("run.toml"), [*words, "--run.placement=shared"])
    assert forecast_run(separate, read_shape("model")).rank.host_bytes == 0
    names = [part.name for part in rank.on_host]
    assert names == ["weights", "optimizer"]
    # vLLM may have all but the rank's base.
    share = 1 - rank.base_bytes / (4 * rank.num_bytes)
    (error,) = misfits("turns", 4 * rank.num_bytes, "--inference.engine=vllm")
    assert f'"--gpu-memory-utilization", "{int(share * 100) / 100}" or less' in error or share > 0.9


def test_what_a_publish_takes_has_to_be_beside_the_share_of_vllm(workplace: Path) -> None:
    words = ["--trainer.device=cuda", "--inference.engine=vllm"]
    config = load_config(Path("run.toml"), words)
    forecast, host = forecast_run(config, read_shape("model")), HostMemory(64 * GIB, 64 * GIB)
    (needed,) = [part.num_bytes for part in forecast.instance.phases if part.name == "publish"]
    assert find_misfits(config, forecast, Capacity(host, 10 * needed + 10)).errors == ()
    (error,) = find_misfits(config, forecast, Capacity(host, 5 * needed)).errors
    assert '"--gpu-memory-utilization", "0.8" or less' in str(error)
    snapshot = [*words, "--publish.transport=snapshot", "--publish.snapshot_dir=/dev/shm/w"]
    assert [
        part.name for part in forecast_run(load_config(Path("run.toml"), snapshot), read_shape("model")).instance.phases
    ] == ["one step"]


def test_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemAvailable:    600 kB\n")
    assert host_memory(meminfo, tmp_path) == HostMemory(1000 * 1024, 600 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path).total_bytes == 1000 * 1024
    (tmp_path / "memory.max").write_text("512000\n")
    (tmp_path / "memory.current").write_text("112000\n")
    assert host_memory(meminfo, tmp_path) == HostMemory(512_000, 400_000)


def test_the_smallest_device_counts_and_a_silent_tool_is_unknown() -> None:
    assert device_memory("cuda", ("0", "1"), lambda _: "81559\n40960\n") == 40_960 * 2**20
    assert device_memory("cuda", ("0",), lambda _: "") is None
    assert device_memory("cpu", (), lambda _: "1") is None


def test_only_the_memory_of_the_devices_that_are_named_counts() -> None:
    asked: list[str] = []

    def run(command: list[str]) -> str:
        asked.append(command[command.index("-i") + 1])
        return "81559\n" if command[0] == "nvidia-smi" else f"  HBM Capacity(MB)    : {65536 - int(asked[-1])}\n"

    assert device_memory("cuda", ("1", "GPU-8a"), run) == 81_559 * 2**20
    assert device_memory("npu", ("3", "5"), run) == (65_536 - 5) * 2**20
    assert asked == ["1,GPU-8a", "3", "5"]
    assert device_memory("cuda", ("MIG-1",), run) is None, "the tool would say that of the whole GPU"


@pytest.mark.distributed
def test_a_port_that_is_taken_and_an_address_of_another_host_are_found_before_a_start(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert main(["run.toml", "--pool.fleet_address", address]) == 2
        assert f"the fleet endpoint cannot listen at {address} (pool.fleet_address): " in capsys.readouterr().err
        assert main(["run.toml", "--pool.fleet_address", address, "--elsewhere"]) == 0
    assert main(["run.toml", "--pool.fleet_address", address]) == 0
    assert main(["run.toml", "--pool.fleet_address", "203.0.113.1:0"]) == 2


@pytest.mark.distributed
def test_a_config_whose_name_looks_like_markup_is_named_as_it_is(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "run.toml").rename(workplace / "[red].toml")
    assert main(["[red].toml"]) == 0
    assert "[red].toml:15" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--algorithm.teacher", "other"], ["--algorithm.name=ppo", "--algorithm.options.critic_path", "other"]]
)
def test_config_json_alone_is_enough_for_the_other_models_too(
    words: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "other").mkdir()
    shutil.copy(workplace / "model" / "config.json", workplace / "other")
    assert main(["run.toml", "--elsewhere", *words]) == 0
    assert "'other' has no tokenizer" in capsys.readouterr().out


def test_a_model_that_cannot_be_looked_at_is_an_error(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run.toml", "--model.path", "n" * 300]) == 2
    assert "cannot be read: File name too long" in capsys.readouterr().err


def with_reward(workplace: Path, code: str) -> None:
    (workplace / "reward.py").write_text(code)
    (workplace / "run.toml").write_text(CONFIG.replace('"exact"', '"python:reward.py:score"'))


SOUND_REWARDS = {
    "own": "def score(prompt, responses, row): return [0.0 for _ in responses]",
    "TRL's": "def score(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]",
    "verl's": "async def score(data_source, solution_str, ground_truth, extra_info=None): return {'score': 1, 'a': 1}",
}


@pytest.mark.distributed
@pytest.mark.parametrize("form", SOUND_REWARDS)
def test_a_reward_of_any_form_is_called_and_may_run(form: str, workplace: Path) -> None:
    rows = ({"prompt": letter, "answer": letter, "data_source": "letters"} for letter in "abcdef")
    (workplace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with_reward(workplace, SOUND_REWARDS[form] + "\n")
    assert main(["run.toml"]) == 0


@pytest.mark.distributed
def test_a_reward_that_cannot_score_is_named_with_its_lines(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_reward(workplace, "def score(prompt, responses, row):\n    return [r.text[0] == 'x' for r in responses]\n")
    assert main(["run.toml"]) == 2
    said = capsys.readouterr().err
    assert "tried with made-up responses to row 0 (from 0), reward 'python:reward.py:score'" in said
    assert "IndexError: string index out of range\ncorrect the reward" in said


@pytest.mark.distributed
def test_rows_that_a_run_would_leave_out_are_warnings(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": letter, "answer": letter} for letter in ("a", "b", "c", "d", "e " * 100)]
    (workplace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["run.toml", "--train.iterations", "null", "--train.epochs", "3"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 5 prompts have more than prompts.max_prompt_tokens = 64" in shown
    assert "\ntrain.epochs = 3 of 4 prompts, 4 a batch: 3 iterations\n" in shown


@pytest.mark.distributed
def test_a_terminal_that_lacks_a_character_gets_its_escape(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="latin-1", write_through=True))
    assert main(["run.toml", "--prompts.system_prompt", "a → b, ä"]) == 0
    assert "a \\u2192 b, ä" in shown.getvalue().decode("latin-1")
