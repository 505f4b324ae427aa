"""Which layouts of the training ranks are accepted: one pure rule, without torch, for all programs that check early.

Accepted layouts are compared with one rank by `tests/support/trainer/layout_matrix.py`; all others are refused with
the key's name before training.

A placement is (tensor_parallel, context_parallel, pipeline_parallel, expert_parallel) over a number of ranks, which
also determines the number of replicas; tensor-parallel ranks always share rows, too. Each rank of a pipeline has one
part of the layers, or virtual_pipeline_parallel of them, which are not neighbours. Recomputation, the distributed
optimizer, tied embeddings, splitting of long groups, and the location of frozen weights work with every placement.
"""

from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.shared.model_shape import ModelShape


def require_layout(trainer: TrainerSection, model: ModelShape, num_ranks: int) -> None:
    """Checks that `num_ranks` training ranks can train this model in the layout of `trainer`.

    Raises:
        ConfigError: they cannot; names the keys, the expected value, and the remedy.
    """
    trainer.num_replicas(num_ranks)
    if model.experts is None and trainer.expert_parallel > 1:
        raise ConfigError(
            f"trainer.expert_parallel is {trainer.expert_parallel}, but the model has no experts: leave it at 1"
        )
    for key, ways, what, size in _divisions(trainer, model):
        if size % ways:
            raise ConfigError(
                f"trainer.{key} = {ways} does not divide the model's {size} {what}: choose a divisor of {size}"
            )
    if model.delta is not None and trainer.context_parallel > 1:
        raise ConfigError(
            f"trainer.context_parallel is {trainer.context_parallel}, but the model has linear attention, whose state "
            "goes from row to row: leave it at 1, and give it more trainer.tensor_parallel"
        )
    num_parts = trainer.pipeline_parallel * trainer.virtual_pipeline_parallel
    if trainer.virtual_pipeline_parallel > 1 and num_parts > model.num_layers:
        most = model.num_layers // trainer.pipeline_parallel
        remedy = f"set {most} at most" if most > 1 else "leave it at 1"
        raise ConfigError(
            f"trainer.virtual_pipeline_parallel is {trainer.virtual_pipeline_parallel}: with trainer.pipeline_parallel "
            f"= {trainer.pipeline_parallel} these are {num_parts} parts, more than the model's {model.num_layers} "
            f"layers: {remedy}"
        )
    if trainer.pipeline_parallel > model.num_layers:
        raise ConfigError(
            f"trainer.pipeline_parallel is {trainer.pipeline_parallel}, more than the model's {model.num_layers} "
            f"layers: set {model.num_layers} at most"
        )
    tensor, kv_heads = trainer.tensor_parallel, model.num_kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        raise ConfigError(
            f"trainer.tensor_parallel = {tensor} is neither a divisor nor a multiple of the model's {kv_heads} key / "
            f"value heads: choose one"
        )
    if kv_heads < tensor and 2 * kv_heads * model.head_dim % tensor:
        raise ConfigError(
            f"trainer.tensor_parallel = {tensor} does not divide the model's {2 * kv_heads * model.head_dim} rows of "
            "keys and values: choose a divisor"
        )
    _require_heads(trainer, model)


def _require_heads(trainer: TrainerSection, model: ModelShape) -> None:
    """Checks that context-parallel ranks can share the heads that a tensor-parallel rank has.

    With more ranks than key / value heads, several ranks have the same one, each with other query heads.
    """
    tensor, context = trainer.tensor_parallel, trainer.context_parallel
    heads, kv_heads = model.num_heads // tensor, max(1, model.num_kv_heads // tensor)
    of_each = "" if tensor == 1 else f" of each of trainer.tensor_parallel = {tensor} ranks"
    if heads % context:
        raise ConfigError(
            f"trainer.context_parallel = {context} does not divide the {heads} attention heads{of_each}: its ranks "
            f"exchange rows for heads; choose a divisor of {heads}"
        )
    if kv_heads % context and context % kv_heads:
        raise ConfigError(
            f"trainer.context_parallel = {context} is neither a divisor nor a multiple of the {kv_heads} key / value "
            f"heads{of_each}: its ranks exchange rows for heads; choose one"
        )


def _divisions(trainer: TrainerSection, model: ModelShape) -> list[tuple[str, int, str, int]]:
    """(key, number of ways, what is divided, its size)."""
    tensor = trainer.tensor_parallel
    experts = model.experts
    # Experts are not divided: each is whole on its rank. What stands beside them, and dense layers, are.
    divided = [] if experts else [("feed-forward size", model.ffn_size)]
    if experts is not None and experts.shared_size:
        divided = [("shared experts' feed-forward size", experts.shared_size)]
        divided += [("feed-forward size", model.ffn_size)] if experts.num_dense else []
    divisions = [
        ("tensor_parallel", tensor, "attention heads", model.num_heads),
        ("tensor_parallel", tensor, "vocabulary entries", model.vocab_size),
    ]
    if model.delta is not None and model.delta.layers:
        divided.append(("key heads of linear attention (linear_num_key_heads)", model.delta.num_key_heads))
    divisions += [("tensor_parallel", tensor, what, size) for what, size in divided]
    if experts is None:
        return divisions
    return [*divisions, ("expert_parallel", trainer.expert_parallel, "experts", experts.num_experts)]
