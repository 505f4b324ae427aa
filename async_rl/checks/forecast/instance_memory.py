"""The memory of one inference instance, counted from what its engine allocates; for `run_forecast`.

The embedded engine is counted part by part: weights, the store of keys and values, and one step
(`inference_service/engine/`). vLLM reserves its memory at start, whatever the run needs.
"""

import argparse
from collections.abc import Sequence
from math import ceil

from async_rl.checks.forecast.memory import (
    BASE,
    COMMUNICATOR_BYTES,
    FINGERPRINT_BYTES,
    MESSAGE_BYTES,
    MIB,
    MemoryPart,
    ProcessMemory,
    fragmentation,
    messages_bytes,
)
from async_rl.checks.forecast.rank_parameters import WEIGHT_BYTES, WIDE_BYTES
from async_rl.config.sections import Config
from async_rl.shared.model_shape import ModelShape

BASE_BYTES = {"cpu": 410 * MIB, "cuda": 700 * MIB, "npu": 700 * MIB}
"""An instance before it has a model: the interpreter with torch, transformers and the server, as measured on a CPU
(docs/benchmarks.md); on a device its context and libraries there, an assumption."""

VLLM_CPU_CACHE_BYTES = 1024 * MIB
"""As `inference_service/vllm/command.py` sets it."""

VLLM_CPU_BASE_BYTES = 1500 * MIB
"""The processes of vLLM's server on a CPU together, an assumption."""

VLLM_DEVICE_SHARE = 0.9
"""vLLM's own default of --gpu-memory-utilization."""

MIN_CAPACITY, GROWTH, FIRST_SLOTS = 64, 1.5, 4
"""As in `inference_service/engine/kv_store.py`; a test compares the store with `store_tokens`, and `store_states`."""

PREFILL_TOKENS = 512
"""As in `inference_service/engine/cache_size.py`."""

MAX_IDLE = 64
"""As in `inference_service/engine/segments.py`: prompts whose states are kept for later requests."""


ROUTE_BYTES = 2
"""Of the number of an expert."""


def instance_memory(config: Config, model: ModelShape) -> ProcessMemory:
    """The peak of one instance, per worker where inference.tensor_parallel is above 1."""
    if config.inference.engine == "vllm":
        return _vllm(config, model)
    device = config.trainer.device
    weights = model.num_parameters * WEIGHT_BYTES[config.model.dtype]
    running = running_responses(config)
    # The CPU's attention computes in float32.
    width = WIDE_BYTES if device == "cpu" else WEIGHT_BYTES[config.model.dtype]
    tokens = store_tokens(config)
    # Beside keys and values the embedded engine keeps which experts each token was sent to.
    routes = ROUTE_BYTES * model.num_layers * model.experts.top_k if model.experts is not None else 0
    base_reason = "interpreter and libraries, as measured" if device == "cpu" else "context, assumed"
    resident = [
        MemoryPart(BASE, BASE_BYTES[device], base_reason),
        MemoryPart("weights", weights, f"{model.num_parameters:,} parameters, {config.model.dtype}"),
        MemoryPart(
            "KV cache",
            tokens * (model.kv_values_per_token * width + routes),
            f"room for {tokens:,} tokens: {running} responses of full length at once",
        ),
    ]
    rows = PREFILL_TOKENS + running
    step = rows * (4 * model.hidden_size + model.qkv_size + 4 * _ffn_of(model)) * WIDE_BYTES
    logits = 3 * running * model.vocab_size * WIDE_BYTES
    phases = [
        MemoryPart("one step", step + logits, f"{rows} rows, {running} rows of logits"),
        *_received(config, model),
    ]
    if model.values_per_sequence:
        states = store_states(config)
        size = states * model.values_per_sequence * WIDE_BYTES
        resident.append(MemoryPart("states", size, f"{states:,} of linear attention, of responses and prompts"))
    if device != "cpu":
        resident.append(fragmentation(resident, phases))
    return ProcessMemory(tuple(resident), tuple(phases), device == "cpu")


def running_responses(config: Config) -> int:
    """Responses that one instance generates at once at most."""
    per_batch = config.prompts.num_drawn * config.rollout.responses_per_prompt
    return min(config.inference.max_concurrency, ceil(per_batch / config.inference.num_instances))


def store_tokens(config: Config) -> int:
    """Tokens for which the store has room when all responses that run at once have their full length.

    Prompts and responses lie on shelves of capacities that are powers of two, and a response passes those below its
    own. A shelf grows by half. `plan_cache` limits all of it.
    """
    running = running_responses(config)
    groups = ceil(running / config.rollout.responses_per_prompt)
    longest = config.max_model_len or config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    prompt = min(config.prompts.max_prompt_tokens, longest)
    response = min(config.rollout.max_response_tokens, longest)
    tokens = _capacity(prompt) * _slots(groups)
    capacity = MIN_CAPACITY
    while capacity <= _capacity(response):
        tokens += capacity * _slots(running)
        capacity *= 2
    per_response = 2 * longest + 2 * MIN_CAPACITY
    return min(tokens, max(config.inference.max_concurrency * per_response, 4 * longest))


def store_states(config: Config) -> int:
    """States of linear attention for which the store has room: of each response that runs, and of each prompt, those
    of the batch that have ended among them as far as they are kept. `plan_cache` limits all of it."""
    running = running_responses(config)
    num_prompts = ceil(config.prompts.num_drawn / config.inference.num_instances)
    groups = ceil(running / config.rollout.responses_per_prompt)
    return _slots(running + min(num_prompts, groups + MAX_IDLE))


def _capacity(num_tokens: int) -> int:
    return max(MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())


def _slots(num_segments: int) -> int:
    slots = 0
    while slots < num_segments:
        slots = max(FIRST_SLOTS, int(GROWTH * slots))
    return slots


def vllm_device_share(engine_options: Sequence[str]) -> float:
    """The part of each device that vLLM takes: --gpu-memory-utilization in its options, or its default."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gpu-memory-utilization", type=float, default=VLLM_DEVICE_SHARE)
    return float(parser.parse_known_args(engine_options)[0].gpu_memory_utilization)


PUBLISH = "publish"

RECEIVED_MESSAGES = {"transformers": 3, "vllm": 4}
"""At once: two on their way and one that is copied; vLLM's loader may hold tensors of the one before."""


def _received(config: Config, model: ModelShape) -> list[MemoryPart]:
    """What a transfer between devices takes besides the weights that it replaces, and changes of them anywhere.

    The buffers through which `ipc` passes it are the main rank's, wherever they are mapped.
    """
    num_groups = config.trainer.num_senders if config.publish.transport == "stages" else 1
    width, number = WEIGHT_BYTES[config.model.dtype], num_groups * RECEIVED_MESSAGES[config.inference.engine]
    if config.publish.transport == "changes" and config.inference.engine == "transformers":
        return [MemoryPart(PUBLISH, model.num_parameters * width // 2, "changes, at most of half of the weights")]
    if config.trainer.device == "cpu" or config.publish.transport == "snapshot":
        return []
    message = MESSAGE_BYTES[config.publish.transport]
    largest = max(model.vocabulary_parameters, model.stacked_parameters) * width
    messages = messages_bytes(message, number, model.num_parameters * width, largest)
    size, reason = messages + FINGERPRINT_BYTES, f"{number} messages, {messages / MIB:,.0f} MiB, and a fingerprint"
    if config.publish.is_broadcast:
        size += num_groups * COMMUNICATOR_BYTES[config.trainer.device]
        reason += "; the group's buffers" if num_groups == 1 else f"; the buffers of {num_groups} groups"
    return [MemoryPart(PUBLISH, size, reason)]


def _ffn_of(model: ModelShape) -> int:
    """Feed-forward values of one row at once: of all its experts, where it has them."""
    if model.experts is None:
        return model.ffn_size
    return model.experts.top_k * model.experts.ffn_size + model.experts.shared_size


def _vllm(config: Config, model: ModelShape) -> ProcessMemory:
    ways = config.inference.tensor_parallel
    weights = ceil(model.num_parameters * WEIGHT_BYTES[config.model.dtype] / ways)
    resident = [MemoryPart("weights", weights, f"{model.num_parameters:,} parameters, {config.model.dtype}")]
    if config.trainer.device == "cpu":
        resident.insert(0, MemoryPart(BASE, VLLM_CPU_BASE_BYTES, "vLLM's server and engine, assumed"))
        resident.append(MemoryPart("KV cache", VLLM_CPU_CACHE_BYTES, "VLLM_CPU_KVCACHE_SPACE as async-rl sets it"))
    else:
        longest = config.max_model_len or config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
        # At least one response of full length, or vLLM refuses to start.
        heads = max(1, ways if ways < model.num_kv_heads else model.num_kv_heads)
        # Latents are whole on each of its devices.
        values = model.kv_values_per_token / heads if model.latents is None else model.latent_values_per_token
        cache = ceil(longest * values) * WEIGHT_BYTES[config.model.dtype]
        cache += ceil(model.values_per_sequence / ways) * WIDE_BYTES
        resident.insert(0, MemoryPart(BASE, BASE_BYTES[config.trainer.device], "context, assumed"))
        resident.append(
            MemoryPart(
                "KV cache",
                cache,
                f"one response of {longest} tokens at least; vLLM takes {VLLM_DEVICE_SHARE:.0%} of the device in all "
                "unless --gpu-memory-utilization says otherwise, and more cache runs more responses at once",
            )
        )
    logits = 3 * config.inference.max_concurrency * ceil(model.vocab_size / ways) * WIDE_BYTES
    phases = (MemoryPart("one step", logits, "logits of all that run at once"), *_received(config, model))
    return ProcessMemory(tuple(resident), phases, config.trainer.device == "cpu")
