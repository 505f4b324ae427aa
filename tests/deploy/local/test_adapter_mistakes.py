"""One thing wrong with adapters at a time: `async-rl check` and `async-rl run` name it, and start nothing."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.adapter import factor_shapes
from async_rl.checks.preflight.weight_files import weights_sample
from async_rl.config.adapter_section import AdapterSection
from async_rl.shared.model_shape import ModelShape
from async_rl.shared.protocol.adapter import BASE_SAMPLE, CONFIG_FILE, WEIGHTS_FILE
from deploy.local import check, run
from tests.deploy.local import test_mistakes
from tests.deploy.local.test_mistakes import VLLM, Mistake, make, records
from tests.support.tiny_model import MODEL_SIZE

workplace = test_mistakes.workplace

BASE = {"model_type": "qwen3", **MODEL_SIZE, "head_dim": 16, "tie_word_embeddings": True}
RANK = ("--adapter.rank", "4")
START = (*RANK, "--adapter.path", "adapters")
OF_VLLM = (*RANK, *VLLM, "--adapter.publish", "adapters")


def tensors(shapes: dict[str, tuple[int, ...]], **metadata: str) -> str:
    """A safetensors file of zeros, as text with its other bytes escaped."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return (len(text).to_bytes(8, "little") + text + bytes(end)).decode(errors="surrogateescape")


FACTORS = dict(factor_shapes(AdapterSection(rank=4), ModelShape.of_config(BASE, "here")))


def saved(weights: str | None, **changes: Any) -> dict[str, str | None]:
    """The files of adapters that fit the model, but for these weights and changes of their config."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": "all-linear", **changes}
    files: dict[str, str | None] = {f"adapters/{CONFIG_FILE}": json.dumps(config)}
    return files if weights is None else {**files, f"adapters/{WEIGHTS_FILE}": weights}


MISTAKES = {
    "an unknown target": Mistake(
        (*RANK, "--adapter.targets", '["lm_head"]'),
        says=("adapter.targets.0: ", "'all-linear', 'q_proj', 'k_proj'", "'lm_head'"),
    ),
    "no targets": Mistake((*RANK, "--adapter.targets", "[]"), says=("adapter.targets: ", "at least 1 item")),
    "a rank above a layer's size": Mistake(
        ("--adapter.rank", "33"), says=("adapter.rank is 33, more than self_attn.q_proj of", "(64 x 32)", "lower it")
    ),
    **{
        f"an alpha of {alpha}": Mistake((*RANK, "--adapter.alpha", alpha), says=("adapter.alpha: ", words))
        for alpha, words in (
            ("0", "greater than or equal to 0.000001"),
            ("-16", "greater than or equal to 0.000001"),
            ("1e300", "less than or equal to 1000000"),
            ("nan", "finite number"),
        )
    },
    "an alpha without a rank": Mistake(
        ("--adapter.alpha", "8"), says=("adapter.alpha is 8.0 and has no effect here: set adapter.rank",)
    ),
    "a path that does not exist": Mistake(
        (*RANK, "--adapter.path", "none"),
        says=(
            "'none' (adapter.path) has no adapter_config.json",
            "name a directory that peft or async-rl export has saved",
        ),
    ),
    "factors that are not finite": Mistake(
        START,
        saved(tensors(FACTORS)[:-4] + "\x00\x00\udc80\x7f"),
        ("'adapters' (adapter.path) has 'base_model.model.model.layers.", "not finite in float32", "damaged"),
    ),
    "targets that leave a layer out": Mistake(
        START,
        saved(tensors(FACTORS), target_modules=["q_proj"]),
        ("has target_modules = ['q_proj'], without 'model.layers.0.", "peft would leave that layer's factors out"),
    ),
    "a target twice": Mistake(
        (*RANK, "--adapter.targets", '["q_proj", "q_proj"]'),
        says=("adapter.targets has 'q_proj' twice: leave one out",),
    ),
    "half of an export": Mistake(
        START, saved(None), ("'adapters' (adapter.path) has no adapter_model.safetensors", "save the adapters")
    ),
    "an export that was cut short": Mistake(
        START,
        saved(tensors(FACTORS)[:-1]),
        ("adapter_model.safetensors' cannot be read as safetensors", "download it again"),
    ),
    "adapters of another model": Mistake(
        START,
        saved(tensors({"x": (0,)})),
        ("'adapters' (adapter.path) has no 'base_model.model.model.layers.0", "are another model's"),
    ),
    "adapters of another rank": Mistake(
        START, saved(tensors(FACTORS), r=8), ("has r = 8, but adapter.rank is 4: set it to that",)
    ),
    **{
        f"patterns of ranks that are {kind}": Mistake(
            START, saved(tensors(FACTORS), rank_pattern=patterns), ("has rank_pattern = ", "save them again")
        )
        for kind, patterns in (("none", {"(": 4}), ("no table", 5))
    },
    "adapters of another base by their digest": Mistake(
        START,
        saved(tensors(FACTORS, **{BASE_SAMPLE: "0123"}), base_model_name_or_path="runs/other"),
        (
            "'adapters' (adapter.path) was trained beside weights whose beginnings have the digest 0123, and those of",
            "model.path 'model' have",
            f"name the base that it belongs to (base_model_name_or_path of its {CONFIG_FILE}: 'runs/other')",
        ),
    ),
    "adapters in place of a model": Mistake(
        files={"model/config.json": None, f"model/{CONFIG_FILE}": "{}"},
        says=("model.path 'model' has adapters, not a model", "async-rl export model --merge"),
    ),
    **{
        f"a base in {method}": Mistake(
            RANK,
            {"model/config.json": json.dumps({**BASE, "quantization_config": {"quant_method": method, **how}})},
            (f"has quantization_config of {method!r}", "weights that are not quantized"),
        )
        for method, how in (("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}), ("gptq", {}))
    },
    "a form of publishes that there is not": Mistake(
        (*RANK, "--adapter.publish", "adapter"), says=("adapter.publish: ", "'merged' or 'adapters'", "'adapter'")
    ),
    "instances that drop their base": Mistake(
        (
            *(*RANK, "--adapter.publish", "adapters"),
            *("--run.placement", "turns", "--publish.transport", "snapshot", "--publish.snapshot_dir", "snapshots"),
        ),
        says=("adapter.publish is 'adapters', but run.placement is 'turns'", "set adapter.publish to 'merged'"),
    ),
    **{
        f"vLLM with {option}": Mistake(
            (*OF_VLLM, "--inference.engine_options", json.dumps([f"--{option}={value}"])),
            says=(
                f"inference.engine_options has --{option} {value!r}, but adapters are published for instances with the "
                f"trainer's base, --{option} {right!r}",
                "leave it out, or set adapter.publish to 'merged'",
            ),
        )
        for option, value, right in (
            ("model", "other", "model"),
            ("dtype", "bfloat16", "float32"),
            ("quantization", "fp8", "none"),
        )
    },
    "vLLM with room for a lower rank": Mistake(
        (*OF_VLLM, "--inference.engine_options", '["--enable-lora", "--max-lora-rank", "1"]'),
        says=("inference.engine_options has --max-lora-rank 1, but adapter.rank is 4: leave it out",),
    ),
    "a rank that vLLM does not know": Mistake(
        ("--adapter.rank", "513", *VLLM, "--adapter.publish", "adapters"),
        says=("adapter.rank is 513, and vLLM takes adapters up to rank 512", "set adapter.publish to 'merged'"),
    ),
}


@pytest.mark.parametrize("program", [check.main, run.main], ids=["check", "run"])
@pytest.mark.parametrize(
    # Whether the Python of an engine can start it is asked, too.
    "name",
    [pytest.param(name, marks=pytest.mark.distributed) if "vLLM with" in name else name for name in MISTAKES],
)
def test_what_is_wrong_with_adapters_is_named_before_anything_starts(
    workplace: Path, name: str, program: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    make(workplace, mistake)
    try:
        code = program(["run.toml", *mistake.words])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code == 2, said
    for part in mistake.says:
        assert part in said
    assert "Traceback" not in said and records(workplace) == {}
    assert not (workplace / "runs").exists(), "a process was started"


@pytest.mark.distributed
def test_adapters_that_say_no_digest_are_compared_with_the_base_that_they_name_where_it_is(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = workplace / "other"
    make(workplace, Mistake(files=saved(tensors(FACTORS), base_model_name_or_path=str(other))))
    assert run.main(["--dry-run", "run.toml", *START]) == 0, "there is none"
    make(workplace, Mistake(files={"other/model.safetensors": tensors({"x": (1,)})}))
    assert run.main(["--dry-run", "run.toml", *START]) == 2
    assert f"was trained beside weights of '{other}' whose beginnings have the digest" in capsys.readouterr().err


@pytest.mark.distributed
def test_adapters_of_this_base_pass_wherever_it_is(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = weights_sample(workplace / "model")
    (workplace / "model").rename(workplace / "moved")
    make(workplace, Mistake(files=saved(tensors(FACTORS, **{BASE_SAMPLE: sample}), base_model_name_or_path="model")))
    assert run.main(["--dry-run", "run.toml", *START, "--model.path", "moved"]) == 0, capsys.readouterr().err


@pytest.mark.distributed
def test_what_is_no_checkpoint_is_not_gone_on_from(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged one that was put aside: the run starts from the adapters, which are looked at."""
    make(workplace, Mistake(files=saved(tensors(FACTORS), r=8)))
    (workplace / "runs/sums/checkpoints/iteration-000001.damaged").mkdir(parents=True)
    assert run.main(["--dry-run", "run.toml", *START, "--run.dir=runs/sums", "--run.resume=true"]) == 2
    assert "'adapters' (adapter.path) has r = 8" in capsys.readouterr().err


def test_of_an_unknown_target_nothing_else_is_said(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--dry-run", "run.toml", *RANK, '--adapter.targets=["lm_head"]']) == 2
    assert "at least 1 item" not in capsys.readouterr().err
