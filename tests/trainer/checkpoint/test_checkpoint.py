"""Checkpoints: training goes on bit for bit, under any layout, and nothing but a whole checkpoint is ever loaded."""

import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from async_rl.errors import ConfigError, Fenced, WriteFailed
from async_rl.method.types import Group
from async_rl.shared.checkpoint_names import newest_checkpoint, whole_checkpoints
from tests.support.full_disk import largest_file
from tests.support.tiers import at_night
from tests.support.trainer.checkpoint_worker import TIMEOUT_S, Run, make_trainer, run_config, train_elementwise
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.checkpoint.files import checkpoint_path, read_manifest, remove_partial, seal
from trainer.checkpoint.tensors import boxes
from trainer.parallel import Parallel
from trainer.policy.optimizer import LearningRate
from trainer.trainer import MegatronTrainer

WORKER = ("-m", "tests.support.trainer.checkpoint_worker")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "has": lambda file: os.truncate(file, file.stat().st_size // 2),
    "was altered": lambda file: file.write_bytes(file.read_bytes()[:-100] + bytes(100)),
    "is missing": Path.unlink,
}


def save(checkpoints: Checkpoints, iteration: int, trainer: MegatronTrainer) -> None:
    checkpoints.find_tensors(trainer.models.policy, trainer.optimizer, trainer.models.old)
    checkpoints.save(iteration, trainer.optimizer)


def start(
    tmp_path: Path, *layouts: tuple[dict[str, Any], list[Run]], num_ranks: int = 2, torchrun: bool = False, **work: Any
) -> None:
    """Runs the worker, see there; with `torchrun` as two ranks of it."""
    work |= {"num_ranks": num_ranks, "layouts": [(layout, list(map(asdict, runs))) for layout, runs in layouts]}
    file = tmp_path / "work.json"
    file.write_text(json.dumps(work))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    subprocess.run(
        [sys.executable, *launcher, *WORKER, file],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_S,
        check=True,
    )


def whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as anybody reads them."""
    reader = dcp.FileSystemReader(path)
    found = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.full(entry.size, math.nan, dtype=entry.properties.dtype) for name, entry in found.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same(path: Path, expected: Path) -> None:
    got, wanted = whole_tensors(path), whole_tensors(expected)
    assert got.keys() == wanted.keys()
    differing = [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)]
    assert not differing, f"{path} differs from {expected} in {differing}"


@pytest.fixture
def saved(tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path) -> tuple[Path, Path]:
    """(a model, the checkpoints of its run after each of three steps)."""
    model, directory = tiny_model("qwen3"), tmp_path / "checkpoints"
    Run(str(model), str(directory), 3, (1, 2, 3), {})(parallel)
    return model, directory


def load(path: Path, model_path: Path, parallel: Parallel, **sections: dict[str, Any]) -> MegatronTrainer:
    config = run_config(str(model_path), **sections)
    trainer = make_trainer(config, parallel)
    checkpoints = Checkpoints(path.parent, 2, parallel, config)
    checkpoints.load(path, trainer.models.policy, trainer.optimizer, trainer.lagged_old, trainer.critic)
    return trainer


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_goes_on_bit_for_bit_in_a_new_process(
    tiny_model: Callable[..., Path], ragged_groups: list[Group], tmp_path: Path, num_ranks: int
) -> None:
    model, batches = str(tiny_model("qwen2", tied=True)), str(tmp_path / "batches")
    Path(batches).write_bytes(pickle.dumps([ragged_groups[:3], ragged_groups[3:], ragged_groups[1:5]]))
    sections = {
        "algorithm": {"kl_coef": 0.1, "old_policy": "lagged"},
        "optimizer": {"clip_grad_norm": 0.5},
        "trainer": {"frozen_weights": "host"},
    }
    uninterrupted = Run(model, str(tmp_path / "a"), 3, (1, 3), sections, batches=batches)
    interrupted = Run(model, str(tmp_path / "b"), 3, (3,), sections, str(tmp_path / "a/iteration-000001"), batches)
    start(tmp_path, ({}, [uninterrupted]), ({}, [interrupted]), num_ranks=num_ranks)
    assert_same(tmp_path / "b/iteration-000003", tmp_path / "a/iteration-000003")


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("names", ["b", "acd"])
def test_training_goes_on_bit_for_bit_under_another_layout(
    names: str, tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    """One step each: 1 rank, tensor parallel, context parallel, pipeline, interleaved stages, replicas that share the
    optimizer, 1 rank again."""
    stages = ["1", "tensor", "context", "pipeline", "interleaved", "replicas", "1 again"]
    # Tied embeddings and query norms in one; in the other an output layer, biases, a key head that ranks share, and
    # stages and chunks of different lengths. In the third gated delta nets, gates, and experts; in the
    # fourth norms of all heads, and of outputs.
    models = {
        "a": ("float32", tiny_model("qwen3", tied=True, num_hidden_layers=4)),
        "b": ("bfloat16", tiny_model("qwen2", num_key_value_heads=1, num_hidden_layers=5)),
        "c": ("float32", tiny_model("qwen3_next", num_hidden_layers=4)),
        "d": ("float32", tiny_model("olmo3", num_key_value_heads=1, num_hidden_layers=5)),
    }
    models = {name: models[name] for name in names}

    def stage(number: int, **options: Any) -> list[Run]:
        """A run per model that goes on where the stage before it has saved."""
        return [
            Run(
                str(model),
                str(tmp_path / name / stages[number]),
                number + 1,
                (number + 1,),
                {"model": {"dtype": dtype}, "trainer": options},
                str(tmp_path / name / stages[number - 1] / f"iteration-00000{number}") if number else None,
            )
            for name, (dtype, model) in models.items()
        ]

    interleaved = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
    for run in stage(0):
        run(parallel)
    start(
        tmp_path,
        ({"tensor_parallel": 2}, stage(1)),
        ({"context_parallel": 2}, stage(2)),
        ({"pipeline_parallel": 2}, stage(3)),
        (interleaved, stage(4, **interleaved)),
        ({}, stage(5)),
    )
    for run in stage(6):
        run(parallel)
    for name, (dtype, model) in models.items():
        expected = tmp_path / name / "uninterrupted"
        Run(str(model), str(expected), 7, tuple(range(1, 8)), {"model": {"dtype": dtype}})(parallel)
        for number, of_stage in enumerate(stages):
            checkpoint = f"iteration-00000{number + 1}"
            assert_same(tmp_path / name / of_stage / checkpoint, expected / checkpoint)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3_moe", {}, marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.nightly),
        ("deepseek_v3", {"context_parallel": 2}),
        ("gpt_oss", {"tensor_parallel": 2}),
    ],
    ids=["qwen3_moe", "deepseek_v3", "deepseek_v3, shared rows", "gpt_oss, divided sinks"],
)
def test_experts_move_between_expert_parallel_ranks_and_one(
    tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    model = str(tiny_model(family))
    Run(model, str(tmp_path / "1"), 3, (1, 2, 3), {})(parallel)
    spread = Run(model, str(tmp_path / "2"), 2, (2,), {}, str(tmp_path / "1/iteration-000001"))
    start(tmp_path, ({"expert_parallel": 2, **layout}, [spread]), torchrun=True)
    assert_same(tmp_path / "2/iteration-000002", tmp_path / "1/iteration-000002")
    Run(model, str(tmp_path / "3"), 3, (3,), {}, str(tmp_path / "2/iteration-000002"))(parallel)
    assert_same(tmp_path / "3/iteration-000003", tmp_path / "1/iteration-000003")


LAYOUTS = {
    "tensor": {"tensor_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "context": {"context_parallel": 2},
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names", [("tensor", "interleaved"), at_night(("tensor", "pipeline", "context", "interleaved"))], ids="-".join
)
def test_adapters_go_on_bit_for_bit_under_any_layout_without_the_weights_below(
    names: tuple[str, ...], tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    """One rank, these of two ranks, one rank; with an old policy and a critic, which have adapters of theirs."""
    model = tiny_model("qwen3", tied=True, num_hidden_layers=4)
    sections = {
        "adapter": {"rank": 3},
        "algorithm": {"name": "ppo", "old_policy": "lagged"},
        "model": {"dtype": "bfloat16"},
    }

    def stage(number: int, name: str, before: str | None, **options: Any) -> Run:
        load = None if before is None else str(tmp_path / before / f"iteration-00000{number - 1}")
        settings = {**sections, "trainer": options}
        return Run(str(model), str(tmp_path / name), number, (number,), settings, load)

    stage(1, "one", None)(parallel)
    before = ("one", *names)
    start(
        tmp_path,
        *(
            (LAYOUTS[name], [stage(number, name, before[number - 2], **LAYOUTS[name])])
            for number, name in enumerate(names, start=2)
        ),
    )
    num_stages = len(names) + 2
    stage(num_stages, "again", names[-1])(parallel)
    Run(str(model), str(tmp_path / "whole"), num_stages, tuple(range(1, num_stages + 1)), sections)(parallel)
    for number, name in enumerate((*before, "again"), start=1):
        checkpoint = f"iteration-00000{number}"
        assert_same(tmp_path / name / checkpoint, tmp_path / "whole" / checkpoint)
    kept = {name.split(".", 1)[1] for name in whole_tensors(tmp_path / f"again/iteration-00000{num_stages}")}
    assert {name for name in kept if "lora" not in name} == {"output_layer.weight"}, "the critic's head"


def test_boxes_hold_each_element_of_the_range_once_and_in_order() -> None:
    rng = random.Random()
    for _ in range(200):
        shape = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 5))]
        numel = math.prod(shape)
        start, stop = sorted(rng.randrange(numel + 1) for _ in range(2))
        elements = torch.arange(numel).view(shape)
        parts = [
            elements[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))].reshape(-1)
            for offset, size in boxes(shape, start, stop)
        ]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, stop)), shape


def test_the_newest_are_kept_and_what_a_killed_save_left_is_removed(
    tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    (directory / ".iteration-000001.partial").mkdir(parents=True)
    (directory / ".iteration-000001.partial" / "__0_0.distcp").write_bytes(bytes(10))
    (directory / "notes").mkdir()
    assert newest_checkpoint(directory) is None
    config = run_config(str(tiny_model("qwen3")))
    trainer = make_trainer(config, parallel)
    checkpoints = Checkpoints(directory, 2, parallel, config)
    for iteration in (1, 2, 3):
        train_elementwise(trainer, iteration)
        save(checkpoints, iteration, trainer)
    checkpoints.close()
    assert {path.name for path in directory.iterdir()} == {"iteration-000002", "iteration-000003", "notes"}
    assert newest_checkpoint(directory) == checkpoint_path(directory, 3)


@pytest.mark.parametrize("lost_at", [1, 2], ids=["before it is written", "before it counts"])
def test_no_checkpoint_of_a_trainer_that_was_replaced_counts(
    saved: tuple[Path, Path], parallel: Parallel, lost_at: int
) -> None:
    """And what its successor is writing stays."""
    model, directory = saved
    before = list(whole_checkpoints(directory))
    theirs = directory / ".iteration-000009.term-8.partial"
    num_checks = 0

    def require_lease() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == lost_at:
            theirs.mkdir()
            raise Fenced("term 7 has ended")

    config = run_config(str(model))
    trainer = make_trainer(config, parallel)
    checkpoints = Checkpoints(directory, 2, parallel, config, term=7, require_lease=require_lease)
    save(checkpoints, 9, trainer)
    with pytest.raises(Fenced):
        checkpoints.wait()
    checkpoints.close()
    assert list(whole_checkpoints(directory)) == before and theirs.is_dir()
    remove_partial(directory)


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before_it(saved: tuple[Path, Path], parallel: Parallel) -> None:
    model, directory = saved
    config = run_config(str(model))
    trainer = make_trainer(config, parallel)
    checkpoints = Checkpoints(directory, 2, parallel, config)
    with largest_file(20_000):
        save(checkpoints, 9, trainer)
        with pytest.raises(
            WriteFailed, match=r"cannot write '.*iteration-000009\.term-0\.partial': .* that there is room \("
        ):
            checkpoints.wait()
    assert newest_checkpoint(directory) == checkpoint_path(directory, 3)
    save(checkpoints, 9, trainer)
    checkpoints.close()
    assert newest_checkpoint(directory) == checkpoint_path(directory, 9)


def test_a_save_holds_the_weights_of_its_moment_while_training_goes_on(
    tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    config = run_config(str(tiny_model("qwen3")))
    trainer = make_trainer(config, parallel)
    checkpoints = Checkpoints(tmp_path, 2, parallel, config)
    before = trainer.models.policy_model.embedding.word_embeddings.weight.detach().clone()
    save(checkpoints, 0, trainer)
    train_elementwise(trainer, 0)
    checkpoints.close()
    saved = whole_tensors(checkpoint_path(tmp_path, 0))["policy.embedding.word_embeddings.weight"]
    assert torch.equal(saved, before)
    assert not torch.equal(trainer.models.policy_model.embedding.word_embeddings.weight, before)


def test_a_failed_save_is_raised_by_the_next_call(
    tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    config = run_config(str(tiny_model("qwen3")))
    trainer = make_trainer(config, parallel)
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file", 2, parallel, config)
    save(checkpoints, 1, trainer)
    with pytest.raises(WriteFailed, match=r"cannot write '.*file.*iteration-000001.*': Not a directory"):
        checkpoints.wait()
    checkpoints.require_no_failure()
    checkpoints.close()


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank-00000.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(
    saved: tuple[Path, Path], parallel: Parallel, name: str, what: str
) -> None:
    model, directory = saved
    DAMAGES[what](checkpoint_path(directory, 3) / name)
    expected = "manifest.json" if name == "manifest.json" else f"{name} {what}"
    with pytest.raises(ConfigError, match=f"{expected}.*Remove the directory; the one before it is iteration-000002"):
        load(checkpoint_path(directory, 3), model, parallel)
    load(checkpoint_path(directory, 2), model, parallel)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"seed": 4}}, "run.seed is 4, but was 3"),
        ({"prompts": {"prompts_per_batch": 3}}, "prompts.prompts_per_batch is 3, but was 2"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature is 0.5, but was 1.0"),
        ({"algorithm": {"clip_low": 0.1}}, "algorithm.clip_low is 0.1, but was 0.2"),
        ({"optimizer": {"beta2": 0.5}}, "optimizer.beta2 is 0.5, but was 0.95"),
        ({"reward": {"name": "reasoning_gym"}}, "reward.name is 'reasoning_gym', but was 'math'"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype is 'bfloat16', but was 'float32'"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    saved: tuple[Path, Path], parallel: Parallel, sections: dict[str, Any], message: str
) -> None:
    model, directory = saved
    with pytest.raises(ConfigError, match=message):
        load(checkpoint_path(directory, 3), model, parallel, **sections)


def test_what_decides_no_figure_may_change(saved: tuple[Path, Path], parallel: Parallel) -> None:
    model, directory = saved
    load(
        checkpoint_path(directory, 3),
        model,
        parallel,
        run={"dir": "elsewhere", "resume": True},
        train={"iterations": 9, "logprob_noise": 2.0},
        reward={"timeout_s": 60.0},
        pool={"timeout_s": 1.0},
        checkpoint={"every": 7},
        trainer={"recompute": "full"},
    )


ACCEPTED: dict[str, Any] = {"run": {"accept_changes": True}}


def test_a_run_goes_on_with_an_old_policy_that_it_did_not_have(saved: tuple[Path, Path], parallel: Parallel) -> None:
    model, directory = saved
    trainer = load(checkpoint_path(directory, 3), model, parallel, **ACCEPTED, algorithm={"old_policy": "lagged"})
    assert trainer.models.old is not None
    old = dict(trainer.models.old._model.named_parameters())
    assert all(torch.equal(old[name], p) for name, p in trainer.models.policy_model.named_parameters())


def test_a_critic_that_the_checkpoint_does_not_have_is_named(saved: tuple[Path, Path], parallel: Parallel) -> None:
    model, directory = saved
    with pytest.raises(
        ConfigError, match=r"iteration-000003' has no critic, which algorithm\.name = 'ppo' goes on wit"
    ):
        load(checkpoint_path(directory, 3), model, parallel, **ACCEPTED, algorithm={"name": "ppo"})


@pytest.mark.parametrize("missing", [(), ("context_parallel",), ("context_parallel", "virtual_pipeline_parallel")])
def test_random_states_go_on_under_the_layout_that_saved_also_of_an_earlier_release(
    saved: tuple[Path, Path], parallel: Parallel, tmp_path: Path, missing: tuple[str, ...]
) -> None:
    model, directory = saved
    checkpoints = Checkpoints(tmp_path / "new", 2, parallel, run_config(str(model)))
    trainer = load(checkpoint_path(directory, 3), model, parallel)
    torch.manual_seed(random.getrandbits(30))
    expected = torch.get_rng_state()
    save(checkpoints, 3, trainer)
    checkpoints.close()
    content = read_manifest(path := checkpoint_path(tmp_path / "new", 3))
    content["layout"] = {key: size for key, size in content["layout"].items() if key not in missing}
    for key in missing:
        del content["config"]["trainer"][key]
    del content["config"]["adapter"]
    (path / "manifest.json").unlink()
    seal(path.rename(tmp_path / "older"), path, content)
    torch.rand(1)
    load(path, model, parallel)
    assert torch.equal(torch.get_rng_state(), expected)


def test_adapters_that_the_checkpoint_does_not_have_are_named(saved: tuple[Path, Path], parallel: Parallel) -> None:
    model, directory = saved
    with pytest.raises(ConfigError, match=r"another model: policy\..*: set model\.path and \[adapter\] to"):
        load(checkpoint_path(directory, 3), model, parallel, **ACCEPTED, adapter={"rank": 2})


@pytest.mark.parametrize("steps_per_batch", [1, 2])
def test_the_learning_rate_goes_on_at_its_iteration_with_another_number_of_steps(
    saved: tuple[Path, Path], parallel: Parallel, steps_per_batch: int
) -> None:
    model, directory = saved
    changes: dict[str, Any] = {"train": {"steps_per_batch": steps_per_batch}, "algorithm": {"old_policy": "model"}}
    optimizer = load(checkpoint_path(directory, 3), model, parallel, **ACCEPTED, **changes).optimizer
    rates = []
    for _ in range(2 * steps_per_batch):
        rates.append(optimizer.learning_rate)
        optimizer.step(optimizer.gradient_norm())
    schedule = LearningRate(run_config(str(model)).optimizer, 6)
    assert rates == [schedule.at_iteration(iteration) for iteration in (3, 4) for _ in range(steps_per_batch)]
    assert schedule.at_iteration(3) != schedule.at_iteration(4)


@pytest.mark.parametrize("size", [{"intermediate_size": 128}, {"num_hidden_layers": 4}, {"num_hidden_layers": 1}])
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(
    saved: tuple[Path, Path], tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path, size: dict[str, int]
) -> None:
    model, directory = saved
    manifest_path = str(model)
    other = run_config(str(tiny_model("qwen3", **size)))
    trainer = make_trainer(other, parallel)
    # The same name, but another model behind it.
    checkpoints = Checkpoints(directory, 2, parallel, run_config(manifest_path))
    before = trainer.models.policy_model.embedding.word_embeddings.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"is of another model: policy\.decoder\.layers.* has shape .* but the"):
        checkpoints.load(checkpoint_path(directory, 3), trainer.models.policy, trainer.optimizer, trainer.models.old)
    assert torch.equal(trainer.models.policy_model.embedding.word_embeddings.weight, before)


@pytest.mark.distributed
def test_whenever_a_run_is_killed_its_newest_checkpoint_loads(
    tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    model, directory = tiny_model("qwen3", hidden_size=128, intermediate_size=512), tmp_path / "checkpoints"
    # It saves all the time, and each time goes on from where the last kill left it.
    run = Run(str(model), str(directory), 10**6, tuple(range(1000)), {})
    start(tmp_path, ({}, [run]), kill=0.3)
    assert len(whole_checkpoints(directory)) > 1
    for path in whole_checkpoints(directory):
        load(path, model, parallel)
