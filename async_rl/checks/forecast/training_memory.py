"""The memory of one training rank, counted from what the trainer allocates; for `run_forecast`.

Where each number comes from stands beside it: Megatron's gradient buffers and optimizer (`trainer/policy/`), the
tensors that autograd keeps of a layer (`trainer/model/`, `trainer/attention/`), and the chunks of logits
(`trainer/model/logprobs.py`). `tests/trainer/test_memory_forecast.py` compares parts of it with real models.

Shape legend: T rows of a micro-batch, H hidden size, F feed-forward size, V vocabulary.
"""

from math import ceil

from async_rl.checks.forecast.memory import (
    BASE,
    BUFFERS,
    COMMUNICATOR_BYTES,
    COMMUNICATORS,
    FINGERPRINT_BYTES,
    IPC_BUFFER_BYTES,
    MESSAGE_BYTES,
    MIB,
    MemoryPart,
    ProcessMemory,
    fragmentation,
    messages_bytes,
)
from async_rl.checks.forecast.rank_parameters import (
    WEIGHT_BYTES,
    WIDE_BYTES,
    RankParameters,
    Shares,
    adapter_parameters,
    rank_parameters,
    trained_model_bytes,
)
from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.config.sections import Config
from async_rl.shared.model_parts import DeltaNet
from async_rl.shared.model_shape import ModelShape

"""Gradient sums, master weights, moments, logits: float32 whatever the model's dtype."""

BASE_BYTES = {"cpu": 350 * MIB, "cuda": 700 * MIB, "npu": 700 * MIB}
"""A rank before it has a model. On a CPU the resident memory of the interpreter with torch, Megatron and transformers,
as measured (docs/benchmarks.md). On a device what its context and libraries take there, which differs between drivers
and is an assumption."""

ATTENTION_BLOCK = 128
"""FlashAttention-2 pads each sequence so far in the float32 sums of its backward pass (torch's flash_api.cpp)."""

CHUNK_BYTES = 256 * MIB
"""As in `trainer/model/logprobs.py`, which cannot be imported from here; a test compares them."""

DELTA_CHUNK_ROWS = 64
"""As in `async_rl/shared/delta_rule.py`, which needs torch."""

PARCEL_BYTES = 64 * MIB
"""As in `trainer/hf/weight_export.py`: what a model-parallel rank assembles of a publish at once."""


def layer_values_per_row(model: ModelShape, shares: Shares, recompute: str, *, fused_swiglu: bool) -> int:
    """Values that autograd keeps of one row in one layer, on one rank.

    The residual stream before both halves of the layer and its norms; what attention, or a gated delta net, keeps; and
    of the feed-forward part the product of its first layer, both halves once more (one activated, the other with
    Megatron's offset), and their product. A fused activation keeps no copies.
    """
    stream = ceil(model.hidden_size / shares.tensor)
    if recompute == "full":
        return stream
    mixing = attention_values_per_row(model, shares)
    if model.delta is not None:
        mixing = max(mixing, delta_values_per_row(model.delta, shares))
    kept = 4 * stream + mixing
    if recompute == "selective":
        return kept
    return kept + feed_forward_values_per_row(model, shares, fused_swiglu=fused_swiglu)


def attention_values_per_row(model: ModelShape, shares: Shares) -> int:
    """Of `layer_values_per_row` those of attention.

    Queries, keys and values as the linear layer made them, queries copied once more where they are normed, both
    rotated; the output. Context-parallel ranks keep what they have received in place of what they have sent, with one
    key / value head at least, and the output twice: as it was made, and as it came back.
    """
    if model.latents is not None:
        return _latent_values_per_row(model, shares)
    queries, keys = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    # Ranks that share key / value heads gather the product of them all.
    shares_heads = model.num_kv_heads < shares.tensor
    keys = keys * shares.tensor // model.num_kv_heads if shares_heads else keys
    made, of_all = (0, model.qkv_size) if shares_heads else (model.qkv_size, 0)
    if shares.context == 1:
        normed = queries if model.qk_norm_heads else 0
        return ceil((made + normed + queries + keys + queries) / shares.tensor) + of_all
    # Norms keep what they have read.
    before = ceil((made + queries) / shares.tensor) + of_all if model.qk_norm_heads else 0
    own_heads = max(1, model.num_kv_heads // shares.tensor)
    received = queries + 2 * keys * max(1, shares.context // own_heads)
    return before + ceil((received + 2 * queries) / shares.tensor)


def _latent_values_per_row(model: ModelShape, shares: Shares) -> int:
    """Latents before and after their norms, on the ranks' own rows and gathered; each head's query, key, and value as
    their projections make them, which context-parallel ranks do not keep, put together and padded; the output."""
    sizes = model.latents
    assert sizes is not None, "the model has latents"
    latents = (sizes.q_rank or 0) + sizes.kv_rank
    made = 4 * model.head_dim + sizes.value_dim
    if shares.context == 1:
        made += sizes.value_dim + sizes.nope_dim
    rows = 2 * latents + sizes.rope_dim
    return latents + ceil(rows / shares.tensor) + ceil(model.num_heads * made / shares.tensor)


def delta_values_per_row(delta: DeltaNet, shares: Shares) -> int:
    """Of `layer_values_per_row` those of a gated delta net: what its projection makes; of this what is mixed with the
    rows before, four times on its way there and once in chunks; the output, normed, and times its activated gate; rates
    and decays on their way."""
    mixed = delta.num_key_heads * delta.mixed_size
    values = delta.num_value_heads * delta.value_dim
    projected = delta.num_key_heads * sum(delta.projected)
    return ceil((projected + 5 * mixed + 4 * values + 8 * delta.num_value_heads) / shares.tensor)


def delta_workspace_per_row(delta: DeltaNet, shares: Shares) -> int:
    """Values, float32, that the backward pass of one layer computes again of a row, and their gradients: each value
    head's queries, keys and values several times, and the row's products with those of its chunk."""
    of_head = 4 * (delta.key_dim + delta.value_dim) + 5 * DELTA_CHUNK_ROWS
    return 2 * ceil(delta.num_value_heads * of_head / shares.tensor)


def feed_forward_values_per_row(model: ModelShape, shares: Shares, *, fused_swiglu: bool) -> int:
    """Of `layer_values_per_row` those of the feed-forward part; experts get rows evenly, copied once for each."""
    dense = ceil((3 if fused_swiglu else 5) * model.ffn_size / shares.tensor)
    if model.experts is None:
        return dense
    # Each rank routes its own rows.
    rows = model.experts.top_k / shares.tensor
    if model.experts.clamped_gate is not None:
        # Their outputs once more, and of the activation the bounded gate, up + 1, both factors and the product.
        return ceil(rows * (3 * model.hidden_size + 7 * model.experts.ffn_size))
    # Their activation is always fused.
    shared = ceil((3 if fused_swiglu else 5) * model.experts.shared_size / shares.tensor)
    with_experts = shared + ceil(rows * (2 * model.hidden_size + 3 * model.experts.ffn_size))
    return max(dense, with_experts) if model.experts.num_dense else with_experts


def group_rows(config: Config) -> int:
    """Of a group whose prompt and responses are as long as they may be; the last token of a response is not fed."""
    return config.prompts.max_prompt_tokens + config.rollout.responses_per_prompt * (
        config.rollout.max_response_tokens - 1
    )


def micro_batch_rows(config: Config) -> int:
    """Of the largest micro-batch: `trainer.micro_batch_tokens`, or all that one step trains, if that is less.

    Of a program's rollouts nothing says how long their histories are.
    """
    if config.rollout.program != SINGLE_TURN:
        return config.trainer.micro_batch_tokens
    groups = ceil(config.prompts.prompts_per_batch / config.train.steps_per_batch)
    return min(config.trainer.micro_batch_tokens, groups * group_rows(config))


def rank_rows(config: Config, shares: Shares) -> int:
    """Of those rows the ones that a context-parallel rank has."""
    return ceil(micro_batch_rows(config) / shares.context)


def activation_bytes(model: ModelShape, shares: Shares, config: Config, *, fused_swiglu: bool) -> int:
    """Of the largest micro-batch, with its backward pass; on the first pipeline stage.

    What is computed again, and the gradients of one layer, exist once.
    """
    recompute, rows = config.trainer.recompute, rank_rows(config, shares)
    width = WEIGHT_BYTES[config.model.dtype]
    layers = len(shares.layers_of(0, model.num_layers))
    kept = layers * layer_values_per_row(model, shares, recompute, fused_swiglu=fused_swiglu)
    whole_layer = layer_values_per_row(model, shares, "none", fused_swiglu=fused_swiglu)
    again = {
        "none": 0,
        "selective": feed_forward_values_per_row(model, shares, fused_swiglu=fused_swiglu),
        "full": whole_layer,
    }[recompute]
    # The gradients of a feed-forward part: of both halves, of their product, and of its input.
    gradients = feed_forward_values_per_row(model, shares, fused_swiglu=True) + 2 * model.hidden_size
    workspace = WIDE_BYTES * delta_workspace_per_row(model.delta, shares) if model.delta else 0
    return rows * (width * (ceil(kept * shares.micro_batches_kept) + again + gradients) + workspace)


def logits_bytes(model: ModelShape, shares: Shares, config: Config) -> int:
    """Logits, their probabilities and one more of that size, of one chunk; then the head's gradient (`logprobs.py`)."""
    row_bytes = ceil(model.vocab_size / shares.tensor) * WIDE_BYTES
    rows = min(rank_rows(config, shares), max(1, CHUNK_BYTES // row_bytes))
    return 3 * rows * row_bytes


def attention_workspace_bytes(model: ModelShape, shares: Shares, config: Config) -> int:
    """Of the backward pass of one layer's attention on a device: float32 sums of the queries' gradients, padded, and
    the gradients of keys and values for each query head. Responses count with their full length."""
    rows = micro_batch_rows(config)
    num_segments = ceil(rows / group_rows(config) * (1 + config.rollout.responses_per_prompt))
    width = ceil(model.num_heads / (shares.tensor * shares.context)) * model.head_dim
    sums = (rows + ATTENTION_BLOCK * num_segments) * width * WIDE_BYTES
    return sums + 2 * rows * width * WEIGHT_BYTES[config.model.dtype]


def publish_bytes(config: Config, model: ModelShape, own: RankParameters, shares: Shares) -> int:
    """Of the first rank, which sends the weights, besides the model.

    A transfer between devices has one message on its way and packs the next one, from tensors that are put together
    where ranks divide them.
    """
    width = WEIGHT_BYTES[config.model.dtype]
    parcels = 2 * max(PARCEL_BYTES, model.stacked_parameters * width) if shares.divides_model else 0
    # The canary's copy of a tied head.
    exported = parcels or own.largest * width
    if config.adapter.is_given:
        # A weight and what its adapter adds, in float32.
        exported += 2 * model.hidden_size * max(model.ffn_size, model.qkv_size) // shares.tensor * WIDE_BYTES
    if config.trainer.device == "cpu" or config.publish.transport == "snapshot":
        return exported
    number = 3 if shares.divides_model else 2
    largest = max(model.vocabulary_parameters, model.stacked_parameters) * width
    message = MESSAGE_BYTES[config.publish.transport]
    messages = messages_bytes(message, number, model.num_parameters * width, largest)
    return exported + messages + FINGERPRINT_BYTES


def rank_memory(
    config: Config, model: ModelShape, num_ranks: int, teacher: ModelShape | None, critic: ModelShape | None
) -> ProcessMemory:
    """The peak of one training rank.

    Args:
        teacher: the model of algorithm.teacher, if there is one.
        critic: that of its critic_path, or `model`, below a critic's head, if the algorithm has a critic.

    Raises:
        ConfigError: `num_ranks` cannot be arranged as the config requires.
    """
    shares = Shares.of(config.trainer, num_ranks)
    own, device = rank_parameters(model, shares), config.trainer.device
    resident = [MemoryPart(BASE, BASE_BYTES[device], _base_reason(device))]
    if device != "cpu":
        num_groups = shares.num_groups + config.publish.is_broadcast
        buffers = MemoryPart(COMMUNICATORS, num_groups * COMMUNICATOR_BYTES[device], f"{num_groups} groups, assumed")
        resident += [buffers] * (num_groups > 0)
    if config.publish.transport == "changes":
        # Changes are at most half of all, and are put together.
        num_bytes = 2 * model.num_parameters * WEIGHT_BYTES[config.model.dtype]
        resident.append(MemoryPart("sent weights", num_bytes, "the main rank's copy, and what has changed of it"))
    if config.publish.transport == "ipc":
        reason = "two of the main rank, which all instances map, for as long as it lives"
        resident.append(MemoryPart(BUFFERS, 2 * IPC_BUFFER_BYTES, reason))
    trained = _trained_parts("", config, model, shares)
    if critic is not None:
        trained += _trained_parts("critic's ", config, critic, shares)
    resident += trained
    frozen = _frozen_parts(config, model, shares, teacher, critic)
    on_host: tuple[MemoryPart, ...] = ()
    if config.trainer.frozen_weights == "host" and frozen:
        on_host = () if device == "cpu" else tuple(frozen)
        # The one in use has a copy on the device; on a CPU both are in the same memory.
        largest = max(part.num_bytes for part in frozen)
        resident += frozen if device == "cpu" else []
        resident.append(MemoryPart("frozen weights in use", largest, "one model at a time is copied for its use"))
    else:
        resident += frozen
    if config.run.placement == "turns" and device != "cpu":
        # Gradient sums are 0 while the instances have the device.
        away = [part for part in trained if not part.name.endswith("gradients")]
        on_host = (*away, *frozen)
    phases = (
        _micro_batch_phase(config, model, shares),
        _optimizer_phase(_stepped(config, model, own, shares), device),
        MemoryPart(
            "publish",
            publish_bytes(config, model, own, shares),
            "tensors that are put together and sent; the canary's copy of a tied head",
        ),
    )
    if device != "cpu":
        resident.append(fragmentation(resident, phases))
    return ProcessMemory(tuple(resident), phases, device == "cpu", on_host)


def _stepped(config: Config, model: ModelShape, own: RankParameters, shares: Shares) -> RankParameters:
    """The parameters that the optimizer steps."""
    if not config.adapter.is_given:
        return own
    count = adapter_parameters(config.adapter, model, shares)
    return RankParameters(count, 0, count)


def _micro_batch_phase(config: Config, model: ModelShape, shares: Shares) -> MemoryPart:
    """The largest micro-batch, with its backward pass."""
    on_device = config.trainer.device != "cpu"
    activations = activation_bytes(model, shares, config, fused_swiglu=on_device)
    workspace = attention_workspace_bytes(model, shares, config) if on_device else 0
    # A frozen head has none.
    head_gradient = 0 if config.adapter.is_given else ceil(model.vocabulary_parameters / shares.tensor) * WIDE_BYTES
    logits = logits_bytes(model, shares, config)
    rows = micro_batch_rows(config)
    ways = f" over {shares.context} ranks" if shares.context > 1 else ""
    limit = "trainer.micro_batch_tokens" if rows == config.trainer.micro_batch_tokens else "all of a step"
    return MemoryPart(
        "activations and logits",
        activations + workspace + max(logits, logits // 3 + 2 * head_gradient),
        f"{rows} rows ({limit}){ways}, recompute = {config.trainer.recompute!r}: activations "
        f"{activations / MIB:,.0f} MiB, logits {logits / MIB:,.0f} MiB"
        + (f", attention's workspace {workspace / MIB:,.0f} MiB" if workspace else ""),
    )


def _base_reason(device: str) -> str:
    return "interpreter and libraries, as measured" if device == "cpu" else "context and libraries, assumed"


def _trained_parts(whose: str, config: Config, model: ModelShape, shares: Shares) -> list[MemoryPart]:
    parameters, dtype = rank_parameters(model, shares), config.model.dtype
    if config.adapter.is_given:
        return _adapted_parts(whose, config, model, parameters.total, shares)
    sizes = trained_model_bytes(parameters, shares, dtype)
    master = "" if dtype == "float32" else ", master weights"
    copies = shares.num_weight_copies
    shared = f" shared by {copies} ranks" if copies > 1 else ""
    count = f"{parameters.total:,} parameters on this rank"
    return [
        MemoryPart(f"{whose}weights", sizes["weights"], f"{count}, {dtype}"),
        MemoryPart(f"{whose}gradients", sizes["gradients"], "float32 sums"),
        MemoryPart(f"{whose}optimizer", sizes["optimizer"], f"AdamW's moments{master}, float32{shared}"),
    ]


def _adapted_parts(whose: str, config: Config, model: ModelShape, total: int, shares: Shares) -> list[MemoryPart]:
    """Of a model of which adapters are trained, in float32."""
    number, dtype = adapter_parameters(config.adapter, model, shares), config.model.dtype
    sizes = trained_model_bytes(RankParameters(number, 0, 0), shares, "float32")
    return [
        MemoryPart(f"{whose}weights", total * WEIGHT_BYTES[dtype], f"{total:,} on this rank, {dtype}, not trained"),
        MemoryPart(f"{whose}adapters", sizes["weights"], f"{number:,} parameters on this rank, float32"),
        MemoryPart(f"{whose}gradients", sizes["gradients"], "of the adapters, float32 sums"),
        MemoryPart(f"{whose}optimizer", sizes["optimizer"], "AdamW's moments of the adapters, float32"),
    ]


def _frozen_parts(
    config: Config, model: ModelShape, shares: Shares, teacher: ModelShape | None, critic: ModelShape | None
) -> list[MemoryPart]:
    """The models without gradients: `trainer.policy.tri_model`, and the critic's old values."""
    width = WEIGHT_BYTES[config.model.dtype]
    own = rank_parameters(model, shares).total * width
    parts = []
    keeps_values = critic is not None and config.train.steps_per_batch > 1
    if config.adapter.is_given:
        # All have the weights of those in training: the reference is the base, old ones have adapters of their own.
        copies = (config.algorithm.old_policy in ("model", "lagged")) + keeps_values
        size = copies * adapter_parameters(config.adapter, model, shares) * WIDE_BYTES
        parts += [MemoryPart("old adapters", size, f"{copies} beside the same weights")] * (copies > 0)
        return parts + _teacher_part(teacher, shares, width)
    if config.algorithm.needs_reference:
        why = "algorithm.kl_coef is above 0" if config.algorithm.kl_coef > 0 else "the algorithm has one"
        parts.append(MemoryPart("reference", own, why))
    if config.algorithm.old_policy in ("model", "lagged"):
        parts.append(MemoryPart("old policy", own, f"algorithm.old_policy = {config.algorithm.old_policy!r}"))
    parts += _teacher_part(teacher, shares, width)
    if critic is not None and keeps_values:
        size = rank_parameters(critic, shares).total * width
        parts.append(MemoryPart("critic's old values", size, "train.steps_per_batch is above 1"))
    return parts


def _teacher_part(teacher: ModelShape | None, shares: Shares, width: int) -> list[MemoryPart]:
    if teacher is None:
        return []
    return [MemoryPart("teacher", rank_parameters(teacher, shares).total * width, "algorithm.teacher")]


def _optimizer_phase(own: RankParameters, device: str) -> MemoryPart:
    """What a step takes besides its state: PyTorch's AdamW makes square roots of second moments, on a CPU tensor by
    tensor, on a device of all of them at once; the fused ones of Transformer Engine and Apex do not."""
    if device == "cpu":
        return MemoryPart("optimizer step", 2 * own.largest * WIDE_BYTES, "roots of one tensor's second moments")
    return MemoryPart("optimizer step", own.total * WIDE_BYTES, "roots of all second moments, without a fused AdamW")
