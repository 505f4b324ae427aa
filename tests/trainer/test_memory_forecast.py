"""The forecast's parts against real models: parameters, gradients, moments, kept activations, the engine's store."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from async_rl.checks.forecast import instance_memory, memory, training_memory
from async_rl.checks.forecast.instance_memory import store_states, store_tokens
from async_rl.checks.forecast.rank_parameters import Shares, rank_parameters, trained_model_bytes
from async_rl.checks.forecast.training_memory import (
    delta_values_per_row,
    feed_forward_values_per_row,
    layer_values_per_row,
    micro_batch_rows,
)
from async_rl.checks.preflight.model import read_shape
from async_rl.method.types import Group
from async_rl.shared import delta_rule
from async_rl.shared.model_shape import ModelShape
from async_rl.shared.weights import ipc, messages
from inference_service.engine import cache_size, kv_store, segments
from inference_service.engine.kv_store import KVStore
from tests.support.groups import random_group
from tests.support.minimal_config import config_of
from tests.support.trainer import kept_worker
from tests.support.trainer.kept_worker import kept_bytes
from trainer.batching.group_slice import num_rows
from trainer.hf import weight_export
from trainer.hf.weight_map import Layout, tied_head, weight_map
from trainer.model import logprobs
from trainer.trainer import MegatronTrainer

ONE_RANK = Shares(1, 1, 1, num_replicas=1)


def parameters_of_rank(model: Path, layout: Layout, stage: int, ep_rank: int) -> int:
    """Values that tensor-parallel rank 0 has, by the trainer's own map of weights."""
    shape = read_shape(model)
    head = tied_head(shape, layout)
    count = 0
    for entry in (*weight_map(shape, layout), *([head] if head else [])):
        if entry.stage == stage and entry.ep_rank in (None, ep_rank):
            num_ranks = layout.ep_size if entry.has_experts else layout.tp_size
            for whole, shard in zip(entry.hf_shapes.values(), entry.shards(0, num_ranks), strict=True):
                count += shard.of(torch.empty(whole, device="meta").__getitem__).numel()
    return count


@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 1), Layout(2, 1, 1), Layout(1, 2, 1), Layout(2, 2, 2), Layout(1, 1, 4), Layout(1, 2, 2, 2)]
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen2", "granite", "qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_next", "gpt_oss"]
)
def test_parameters_of_the_largest_rank_are_those_of_the_weight_map(
    family: str, tied: bool, layout: Layout, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model(family, tied=tied, num_hidden_layers=5 if layout.num_chunks > 1 else 3)
    if layout.ep_size > 1 and read_shape(model).experts is None:
        layout = dataclasses.replace(layout, ep_size=1)
    shares = Shares(layout.tp_size, layout.pp_size, layout.ep_size, num_replicas=1, num_chunks=layout.num_chunks)
    found = max(parameters_of_rank(model, layout, stage, 0) for stage in range(layout.pp_size))
    assert rank_parameters(read_shape(model), shares).total == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradients_and_moments_have_the_forecast_bytes(
    dtype: str,
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
) -> None:
    model = tiny_model("qwen3", tied=True)
    trainer = make_trainer(model, dtype=dtype)
    trainer.accumulate([ragged_groups])
    trainer.optimizer_step()
    policy = trainer.models.policy
    forecast = trained_model_bytes(rank_parameters(read_shape(model), ONE_RANK), ONE_RANK, dtype)
    assert forecast["weights"] == sum(p.numel() * p.element_size() for p in policy.parameters())
    # Megatron pads its buffers.
    gradients = sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in policy.buffers)
    assert forecast["gradients"] == pytest.approx(gradients, rel=0.05)
    states = list(trainer.optimizer.parameter_states())
    moments = sum(moment.numel() * 4 for state in states for moment in state.moments.values())
    masters = 0 if dtype == "float32" else sum(state.master.numel() * 4 for state in states)
    assert forecast["optimizer"] == moments + masters


def of_depth(tiny_model: Callable[..., Path], family: str, num_layers: int) -> Path:
    size = {"num_hidden_layers": num_layers, "hidden_size": 64, "intermediate_size": 192}
    return tiny_model(family, **size, **{"first_k_dense_replace": 9} if family == "deepseek_v3" else {})


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "deepseek_v3", "gpt_oss"])
def test_activations_of_a_layer_are_those_that_autograd_keeps(
    family: str,
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
) -> None:
    # Others are run without gradients.
    groups = [group for group in ragged_groups if len(set(group.rewards)) > 1]
    rows = sum(num_rows(group) for group in groups)
    # The difference of two depths: what is outside of the layers is equal.
    found = {}
    for num_layers in (1, 3):
        model = of_depth(tiny_model, family, num_layers)
        trainer = make_trainer(model)
        found[num_layers] = kept_bytes(trainer, groups)
    per_row = layer_values_per_row(read_shape(model), ONE_RANK, "none", fused_swiglu=False)
    # Norms' scales and log-sum-exps, a few values of each row, are left out.
    assert (found[3] - found[1]) / 2 == pytest.approx(4 * rows * per_row, rel=0.08)


@pytest.mark.distributed
def test_activations_of_ranks_that_share_rows_are_those_that_autograd_keeps(
    tiny_model: Callable[..., Path], ragged_groups: list[Group], tmp_path: Path
) -> None:
    """Also where several ranks have the same key / value head."""
    groups = [group for group in ragged_groups if len(set(group.rewards)) > 1]
    rows = sum(num_rows(group) for group in groups)
    families = ("qwen3", "llama", "deepseek_v3")
    models = [of_depth(tiny_model, family, num_layers) for family in families for num_layers in (1, 3)]
    models += [tiny_model("qwen3", num_key_value_heads=1, num_hidden_layers=n, hidden_size=64) for n in (1, 3)]
    layout = {"context_parallel": 2}
    (tmp_path / "cases").write_bytes(pickle.dumps([(str(model), layout) for model in models]))
    (tmp_path / "groups").write_bytes(pickle.dumps(groups))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, "-m", kept_worker.__name__, tmp_path / "cases", tmp_path / "groups", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
        timeout=240,
        check=True,
    )
    shares = dataclasses.replace(ONE_RANK, context=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for model, shallow, deep in zip(models[1::2], found[::2], found[1::2], strict=True):
            per_row = layer_values_per_row(read_shape(model), shares, "none", fused_swiglu=False)
            assert (deep - shallow) / 2 == pytest.approx(4 * ceil(rows / 2) * per_row, rel=0.08), model


def test_activations_of_gated_delta_nets_are_those_that_autograd_keeps(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer]
) -> None:
    """Of whole chunks: the places of shorter ones are kept, too."""
    groups = [random_group(0, 128, (65, 129, 129, 65), rewards=(0, 1, 0, 1))]
    found = {}
    for num_layers in (1, 3):
        size = {"num_hidden_layers": num_layers, "hidden_size": 64, "intermediate_size": 192}
        model = tiny_model("qwen3_5_text", **size, full_attention_interval=9)
        found[num_layers] = kept_bytes(make_trainer(model), groups)
    shape = read_shape(model)
    assert shape.delta is not None
    per_row = 4 * 64 + delta_values_per_row(shape.delta, ONE_RANK)
    per_row += feed_forward_values_per_row(shape, ONE_RANK, fused_swiglu=False)
    assert (found[3] - found[1]) / 2 == pytest.approx(4 * num_rows(groups[0]) * per_row, rel=0.08)


def test_recomputation_keeps_less_and_sharing_divides() -> None:
    sizes = ModelShape("qwen3", 4, 64, 192, 4, 2, 16, 96, 1e-6, 1e4, None, tied=True)
    whole, selective, full = (
        layer_values_per_row(sizes, ONE_RANK, recompute, fused_swiglu=False)
        for recompute in ("none", "selective", "full")
    )
    assert full == 64 < selective < whole
    halved = dataclasses.replace(ONE_RANK, tensor=2)
    assert layer_values_per_row(sizes, halved, "none", fused_swiglu=False) * 2 == whole
    config = config_of(trainer={"micro_batch_tokens": 1000, "recompute": "full"})
    of_two = dataclasses.replace(ONE_RANK, context=2)
    alone, shared = (
        training_memory.activation_bytes(sizes, shares, config, fused_swiglu=True) for shares in (ONE_RANK, of_two)
    )
    assert 0.5 * alone <= shared < 0.6 * alone
    assert training_memory.logits_bytes(sizes, of_two, config) * 2 == training_memory.logits_bytes(
        sizes, ONE_RANK, config
    )


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2), (2, 3), (4, 2), (8, 5)])
def test_a_pipeline_keeps_what_its_schedule_runs_ahead(stages: int, chunks: int) -> None:
    """What Megatron runs forward on the first stage before the first backward pass, and one more."""
    group = SimpleNamespace(size=lambda: stages, rank=lambda: 0)
    size = chunks if chunks > 1 else None
    communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=size)
    _, _, num_ahead, _ = get_pp_rank_microbatches(64 * stages, chunks, stages, p2p_communicator=communicator)
    shares = dataclasses.replace(ONE_RANK, pipeline=stages, num_chunks=chunks)
    assert shares.micro_batches_kept * chunks == pytest.approx(num_ahead + 1)


def test_a_micro_batch_has_no_more_rows_than_a_step() -> None:
    batch: dict[str, dict[str, Any]] = {
        "prompts": {"prompts_per_batch": 5, "max_prompt_tokens": 64},
        "rollout": {"responses_per_prompt": 8, "max_response_tokens": 8},
    }
    assert micro_batch_rows(config_of(**batch)) == 5 * (64 + 8 * 7)
    assert micro_batch_rows(config_of(**batch, trainer={"micro_batch_tokens": 500})) == 500
    of_two_steps = config_of(**batch, train={"steps_per_batch": 2}, algorithm={"old_policy": "model"})
    assert micro_batch_rows(of_two_steps) == 3 * (64 + 8 * 7)
    batch["rollout"]["program"] = "python:program.py:rollout"
    assert micro_batch_rows(config_of(**batch)) == 4096, "how long its turns are is not known"


def test_a_rank_on_a_device_counts_groups_messages_workspace_and_fragmentation() -> None:
    sizes = ModelShape("qwen3", 4, 2048, 6144, 16, 8, 128, 151_936, 1e-6, 1e6, None, tied=True)

    def parts(num_ranks: int, **sections: dict[str, Any]) -> dict[str, int]:
        config = config_of(model={"dtype": "bfloat16"}, **sections)
        forecast = training_memory.rank_memory(config, sizes, num_ranks, None, None)
        return {part.name: part.num_bytes for part in (*forecast.resident, *forecast.phases)}

    on_cpu, alone, of_two = parts(1), parts(1, trainer={"device": "cuda"}), parts(2, trainer={"device": "cuda"})
    assert not {"communicators", "fragmentation"} & on_cpu.keys()
    # That of the weights, that of all ranks, and that of the replicas.
    assert of_two["communicators"] == 3 * alone["communicators"] == 3 * memory.COMMUNICATOR_BYTES["cuda"]
    # The embedding is a message of its own, and another one is packed meanwhile.
    head = 151_936 * 2048 * 2
    assert alone["publish"] == on_cpu["publish"] + head + memory.MESSAGE_BYTES["broadcast"] + memory.FINGERPRINT_BYTES
    in_all = {name: size for name, size in alone.items() if name not in ("fragmentation", "optimizer step", "publish")}
    assert alone["fragmentation"] == pytest.approx(0.05 * sum(in_all.values()), abs=1)
    prompts = {"prompts": {"max_prompt_tokens": 96}, "rollout": {"responses_per_prompt": 8, "max_response_tokens": 117}}
    two_groups = config_of(model={"dtype": "bfloat16"}, trainer={"micro_batch_tokens": 2048}, **prompts)
    sums, of_keys_and_values = (2048 + 128 * 2 * 9) * 2048 * 4, 2 * 2048 * 2048 * 2
    assert training_memory.attention_workspace_bytes(sizes, ONE_RANK, two_groups) == sums + of_keys_and_values


def test_weights_that_pass_from_device_to_device_on_one_host_count_their_two_buffers_once_and_no_group() -> None:
    sizes = ModelShape("qwen3", 4, 2048, 6144, 16, 8, 128, 151_936, 1e-6, 1e6, None, tied=True)
    head, message = 151_936 * 2048 * 2, 64 * 2**20

    def parts(transport: str, of_instance: bool) -> dict[str, int]:
        publish = {"transport": transport, "snapshot_dir": Path("/dev/shm/x")}
        sections = {"run": {"placement": "shared"}, "trainer": {"device": "cuda"}, "publish": publish}
        config = config_of(model={"dtype": "bfloat16"}, **sections)
        forecast = instance_memory.instance_memory(config, sizes)
        if not of_instance:
            forecast = training_memory.rank_memory(config, sizes, 1, None, None)
        return {part.name: part.num_bytes for part in (*forecast.resident, *forecast.phases)}

    rank, before = parts("ipc", of_instance=False), parts("snapshot", of_instance=False)
    assert rank["weight buffers"] == 2 * message and "weight buffers" not in before
    # The embedding is a message of its own, and another one is packed meanwhile.
    assert rank["publish"] == before["publish"] + head + message + memory.FINGERPRINT_BYTES
    instance, before = parts("ipc", of_instance=True), parts("snapshot", of_instance=True)
    assert "publish" not in before and "weight buffers" not in instance
    assert instance["publish"] == head + 2 * message + memory.FINGERPRINT_BYTES


@pytest.mark.parametrize(("prompt", "response", "batch"), [(64, 57, 4), (100, 300, 6), (1, 1, 1), (70, 64, 9)])
def test_the_store_has_the_forecast_room_when_all_responses_are_whole(prompt: int, response: int, batch: int) -> None:
    config = config_of(
        prompts={"prompts_per_batch": batch, "max_prompt_tokens": prompt},
        rollout={"max_response_tokens": response, "responses_per_prompt": 8},
        inference={"max_concurrency": 256},
    )
    store = KVStore(1, 1, 2, torch.float32, torch.device("cpu"), max_tokens=10**9)
    for _ in range(batch):
        store.new(prompt, is_shared=True)
    places = [store.new(1, is_shared=False) for _ in range(8 * batch)]
    for length in (1, 2, 60, 65, 130, 257, response):
        for place in places if length <= response else ():
            store.reserve(place, length)
    room = sum(shelf.capacity * shelf.num_slots for shelf in store._shelves.values())
    assert store_tokens(config) == room


def test_the_store_has_the_forecast_states_when_all_responses_run(tiny_model: Callable[..., Path]) -> None:
    """And when the batch's other prompts are kept beside them."""
    shape = read_shape(tiny_model("qwen3_next", num_hidden_layers=4))
    for batch, concurrency in ((4, 256), (9, 256), (9, 16), (1, 1)):
        config = config_of(
            prompts={"prompts_per_batch": batch, "max_prompt_tokens": 8},
            rollout={"max_response_tokens": 8, "responses_per_prompt": 8},
            inference={"max_concurrency": concurrency},
        )
        store = KVStore(4, 1, 2, torch.float32, torch.device("cpu"), 10**9, delta=shape.delta, state_tokens=3)
        places = [store.new(8, is_shared=True) for _ in range(batch)]
        places += [store.new(8, is_shared=False) for _ in range(min(8 * batch, concurrency))]
        state = places[-1].state
        assert state is not None and state.shelf.num_slots == store_states(config)
        size = sum(tensor.numel() for tensors in state.shelf.tensors for tensor in tensors)
        assert size == store_states(config) * shape.values_per_sequence
        parts = {part.name: part.num_bytes for part in instance_memory.instance_memory(config, shape).resident}
        assert parts["states"] == 4 * size


def test_constants_that_the_forecast_repeats_are_those_of_trainer_and_engine() -> None:
    assert training_memory.CHUNK_BYTES == logprobs.CHUNK_BYTES
    assert training_memory.PARCEL_BYTES == weight_export.PARCEL_BYTES
    assert training_memory.DELTA_CHUNK_ROWS == delta_rule.CHUNK_ROWS
    of_group, of_ipc = messages.bucket_bytes_of("nccl"), messages.bucket_bytes_of(ipc.ipc_backend("nccl"))
    of_groups = dict.fromkeys(("broadcast", "stages", "changes"), of_group)
    assert of_groups | {"ipc": of_ipc} == memory.MESSAGE_BYTES
    assert ipc.PIECE_BYTES == memory.IPC_BUFFER_BYTES
    assert instance_memory.PREFILL_TOKENS == cache_size.PREFILL_TOKENS
    assert instance_memory.MAX_IDLE == segments.MAX_IDLE
    assert (instance_memory.MIN_CAPACITY, instance_memory.GROWTH) == (kv_store.MIN_CAPACITY, kv_store.GROWTH)
