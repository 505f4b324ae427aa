"""What an engine may compute with in place of the checkpoint, by name: each scores tokens as such an engine would.

A hypothesis changes weights, config.json, one module or the tokens of an `ExactModel` for the time of a score. Those
without anything to change in a model are not made. Names are the causes in `docs/audit.md`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from async_rl.rollouts.publish.adapter_faults import SCALES
from async_rl.shared.tensor_classes import class_of
from trainer.audit.engine import Sample
from trainer.audit.exact_model import Adapter, ExactModel, LogitsEdit, changed, configured, with_tied

Values = Mapping[str, torch.Tensor]
"""Parameters by Hugging Face name."""

NO_WINDOW = 2**20
FP8_MAX = 448.0
"""Of e4m3."""
GROUP = 32
"""Weights that share a scale in four bits."""
PADDED_TO = (64, 128, 256, 512)
"""Multiples to which engines pad a vocabulary."""
THETAS = (1e4, 5e5, 1e6)
OTHER_FACTORS = (0.5, 2.0, 4.0)
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "routed_scaling_factor": (1.0,),
    "norm_topk_prob": (True, False),
}
"""Keys of config.json that engines were seen to ignore, with the values that stand for that."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`applied` changes the model, `samples` what it reads, `edit` its logits."""

    name: str
    applied: Callable[[ExactModel], AbstractContextManager[None]]
    samples: Callable[[Sample], Sample] = lambda sample: sample
    edit: LogitsEdit | None = None

    def score(self, exact: ExactModel, samples: Sequence[Sample]) -> torch.Tensor | None:
        """float64 [N]; None where there is no such model."""
        try:
            with self.applied(exact):
                return exact.logprobs([self.samples(sample) for sample in samples], edit=self.edit)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError):
            # Another config.json may be none that transformers computes with.
            return None


def hypotheses(exact: ExactModel, dtype: str, bos: int | None) -> Iterator[Hypothesis]:
    """Those that need nothing but the checkpoint, and adapters if there are any."""
    yield from _of_adapters(exact)
    yield from _of_order(exact)
    yield from _of_modules(exact)
    yield from _of_config(exact.model.config)
    yield from _of_rounding(exact, dtype)
    yield from _of_tokens(exact, bos)


def of_before(exact: ExactModel, before: Values) -> Iterator[Hypothesis]:
    """Those of the weights of the step before: all of them, and a head that is tied no more."""
    yield by_weights("stale every tensor", before)
    if _is_tied(exact):
        head = _name_of(exact, exact.model.get_output_embeddings().weight, last=True)
        yield by_weights("tied head untied (stale head)", {head: before[head]}, keeps_ties=False)


def units_of_before(exact: ExactModel, before: Values) -> tuple[dict[str, Values], dict[str, Values]]:
    """What of the step before may be left in an engine alone: by class of tensors, and by layer."""
    classes: dict[str, Values] = {}
    layers: dict[str, Values] = {}
    own = exact.parameters()
    for name, value in before.items():
        if torch.equal(value, own[name]):
            continue
        key = class_name(name)
        classes[key] = {**classes.get(key, {}), name: value}
        if ".layers." in name:
            key = _layer_of(name)
            layers[key] = {**layers.get(key, {}), name: value}
    return classes, layers


def class_name(name: str) -> str:
    """The class of a tensor; of one that the house has no name for its own name within a layer."""
    try:
        return class_of(name if name.endswith((".weight", ".bias")) or ".experts" in name else f"{name}.weight")
    except (KeyError, IndexError):
        return name.split(".", 3)[-1].removesuffix(".weight")


def by_weights(name: str, values: Values, *, keeps_ties: bool = True) -> Hypothesis:
    """Some parameters with other values."""

    def apply(exact: ExactModel) -> AbstractContextManager[None]:
        return changed(exact, with_tied(exact, values) if keeps_ties else values)

    return Hypothesis(name, apply)


def of_shares(name: str, shares: Callable[[str], float]) -> Hypothesis:
    """Adapters of which each layer has a share: 0 for none of its own, 1 for all of it."""

    def apply(exact: ExactModel) -> AbstractContextManager[None]:
        own = exact.parameters()
        return changed(
            exact,
            {
                f"{layer}.weight": own[f"{layer}.weight"] + (share - 1) * adapter.delta
                for layer, adapter in exact.adapters.items()
                if (share := shares(layer)) != 1
            },
        )

    return Hypothesis(name, apply)


def with_adapters(name: str, exact: ExactModel, others: Mapping[str, Adapter]) -> Hypothesis:
    """Other adapters in place of the model's."""
    own = exact.parameters()
    values = {}
    for layer in {**exact.adapters, **others}:
        weight = own[f"{layer}.weight"]
        weight = weight - exact.adapters[layer].delta if layer in exact.adapters else weight
        values[f"{layer}.weight"] = weight + others[layer].delta if layer in others else weight
    return by_weights(name, values)


def units_of_adapters(exact: ExactModel) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Layers with adapters by the kind of matrix, and by the layer of the model."""
    kinds: dict[str, list[str]] = {}
    layers: dict[str, list[str]] = {}
    for name in exact.adapters:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
        layers.setdefault(_layer_of(name), []).append(name)
    return kinds, layers


def _of_adapters(exact: ExactModel) -> Iterator[Hypothesis]:
    if not exact.adapters:
        return
    yield of_shares("adapters: none of them", lambda _: 0.0)
    ranks = {adapter.a.shape[0] for adapter in exact.adapters.values()}
    for percent in dict.fromkeys((*SCALES, *(100 * rank for rank in ranks))):
        yield of_shares(f"adapters: all multiplied by {percent / 100:g}", lambda _, share=percent / 100: share)  # type: ignore[misc]


def _of_order(exact: ExactModel) -> Iterator[Hypothesis]:
    own = exact.parameters()
    yield from _exchanged("gate and up exchanged", own, "gate_proj.weight", "up_proj.weight")
    yield from _exchanged("k and v exchanged", own, "k_proj.weight", "v_proj.weight")
    fused = {name: _halves(value) for name, value in own.items() if name.endswith("gate_up_proj") and value.ndim == 3}
    if fused and exact.model.config.model_type != "gpt_oss":
        yield by_weights("gate and up exchanged", fused)
    if pairs := {
        name: _in_pairs(value, exact.model.config)
        for name, value in own.items()
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight"))
    }:
        yield by_weights("rope pairs interleaved", pairs)


def _exchanged(name: str, own: Values, first: str, second: str) -> Iterator[Hypothesis]:
    values: dict[str, torch.Tensor] = {}
    for one in (key for key in own if key.endswith(first)):
        other = one.removesuffix(first) + second
        if other in own and own[other].shape == own[one].shape:
            values |= {one: own[other], other: own[one]}
    if values:
        yield by_weights(name, values)


def _halves(value: torch.Tensor) -> torch.Tensor:
    return torch.cat(value.chunk(2, dim=1)[::-1], dim=1)


def _in_pairs(value: torch.Tensor, config: Any) -> torch.Tensor:
    """The rows of each head as an engine needs them that rotates neighbours, not halves."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return value.view(-1, 2, size // 2, value.shape[1]).transpose(1, 2).reshape(value.shape)


def _of_modules(exact: ExactModel) -> Iterator[Hypothesis]:
    norms = [name for name, _ in exact.model.named_modules() if name.endswith(("q_norm", "k_norm"))]
    if norms:
        yield Hypothesis("q and k norms missing", partial(_replaced, names=norms, forward=lambda x: x))
    biases = {name: torch.zeros_like(p) for name, p in exact.parameters().items() if name.endswith("proj.bias")}
    if biases:
        yield by_weights("biases missing", biases)
    embedding = exact.model.get_input_embeddings().weight
    if not _is_tied(exact):
        head = _name_of(exact, exact.model.get_output_embeddings().weight)
        yield by_weights("untied head tied", {head: embedding})
    if "gemma" in exact.model.config.model_type:
        norm = {name: p - 1 for name, p in exact.parameters().items() if name.endswith("norm.weight")}
        yield by_weights("norms multiplied by w, not 1 + w", norm)


@contextmanager
def _replaced(exact: ExactModel, names: Sequence[str], forward: Callable[[Any], Any]) -> Iterator[None]:
    modules = [exact.layer(name) for name in names]
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _of_config(config: Any) -> Iterator[Hypothesis]:
    found = config.to_dict()
    window = found.get("sliding_window")
    if window:
        yield by_config("window ignored", {"sliding_window": NO_WINDOW})
        for other in (window - 1, window + 1, 2 * window):
            yield by_config(f"window of {other}", {"sliding_window": other})
    yield from _of_rope(found.get("rope_parameters") or {})
    for key, values in NEUTRAL.items():
        for value in values:
            if key in found and found[key] is not None and found[key] != value:
                yield by_config(f"{key} {value}" if len(values) > 1 else f"{key} ignored", {key: value})


def by_config(name: str, changes: Mapping[str, Any]) -> Hypothesis:
    return Hypothesis(name, partial(configured, changes=changes))


def _of_rope(rope: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """Of one rope, or one for each type of layers."""

    def every(change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
        if "rope_theta" in rope:
            return dict(change(rope))
        return {kind: change(own) if isinstance(own, Mapping) else own for kind, own in rope.items()}

    def is_scaled(own: Mapping[str, Any]) -> bool:
        return bool(own.get("rope_type", "default") != "default")

    ropes = [rope] if "rope_theta" in rope else [own for own in rope.values() if isinstance(own, Mapping)]
    if any(map(is_scaled, ropes)):
        kept = ("rope_theta", "partial_rotary_factor")
        plain = every(lambda own: {"rope_type": "default", **{key: own[key] for key in kept if key in own}})
        yield by_config("rope scaling ignored", {"rope_parameters": plain})
        for by in OTHER_FACTORS:
            other = every(lambda own, by=by: {**own, "factor": by * own["factor"]} if "factor" in own else own)  # type: ignore[misc]
            factors = sorted({own["factor"] for own in ropes if "factor" in own})
            yield by_config(
                f"rope scaling of factor {', '.join(f'{by * f:g}' for f in factors)}", {"rope_parameters": other}
            )
    for theta in THETAS:
        if ropes and all(own.get("rope_theta") != theta for own in ropes):
            other = every(lambda own, theta=theta: {**own, "rope_theta": theta})  # type: ignore[misc]
            yield by_config(f"rope theta {theta:g}", {"rope_parameters": other})
    if ropes and not any(map(is_scaled, ropes)):
        for factor in (2.0, 4.0):
            other = every(lambda own, factor=factor: {**own, "rope_type": "linear", "factor": factor})  # type: ignore[misc]
            yield by_config(f"rope positions divided by {factor:g}", {"rope_parameters": other})


def _of_rounding(exact: ExactModel, dtype: str) -> Iterator[Hypothesis]:
    own = exact.parameters()
    head = exact.model.get_output_embeddings()
    [head_path] = [name for name, module in exact.model.named_modules() if module is head][:1]
    if dtype == "float32":
        yield by_weights("weights in bfloat16", {name: p.bfloat16() for name, p in own.items()})
        yield Hypothesis(
            "head in bfloat16", partial(_replaced, names=[head_path], forward=partial(_bfloat16_head, head.weight))
        )
    yield by_weights("head in fp8", {f"{head_path}.weight": _fp8(head.weight)}, keeps_ties=False)
    matrices = {
        name: p
        for name, p in own.items()
        if p.ndim >= 2 and ".layers." in name and not name.endswith((".gate.weight", "router.weight", "conv1d.weight"))
    }
    for name, rounded in (("int8", _int8), ("fp8", _fp8), ("4 bits", _int4)):
        yield by_weights(f"weights in {name}", {key: rounded(p) for key, p in matrices.items()})


def _bfloat16_head(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden.bfloat16(), weight.bfloat16()).float()


def _int8(weight: torch.Tensor) -> torch.Tensor:
    """One scale for each output."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def _fp8(weight: torch.Tensor) -> torch.Tensor:
    """e4m3, one scale for each output."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (weight / scale).to(torch.float8_e4m3fn).to(weight) * scale


def _int4(weight: torch.Tensor) -> torch.Tensor:
    size = GROUP if weight.shape[-1] % GROUP == 0 else weight.shape[-1]
    grouped = weight.reshape(-1, size)
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return ((grouped / scale).round() * scale).reshape(weight.shape)


def _of_tokens(exact: ExactModel, bos: int | None) -> Iterator[Hypothesis]:
    if bos is not None:
        yield Hypothesis("BOS added", _as_it_is, lambda sample: replace(sample, prompt=(bos, *sample.prompt)))
    yield Hypothesis("first token dropped", _as_it_is, lambda sample: replace(sample, prompt=sample.prompt[1:]))
    for multiple in PADDED_TO:
        if num_padded := -exact.vocab_size % multiple:
            yield Hypothesis(
                f"padded vocabulary (to a multiple of {multiple})",
                _as_it_is,
                edit=partial(F.pad, pad=(0, num_padded), value=0.0),
            )


@contextmanager
def _as_it_is(exact: ExactModel) -> Iterator[None]:
    yield


def _is_tied(exact: ExactModel) -> bool:
    same: bool = exact.model.get_output_embeddings().weight is exact.model.get_input_embeddings().weight
    return same


def _name_of(exact: ExactModel, parameter: torch.Tensor, *, last: bool = False) -> str:
    names = [name for name, own in exact.parameters().items() if own is parameter]
    return names[-1 if last else 0]


def _layer_of(name: str) -> str:
    """Such as "model.layers.3"."""
    before, _, after = name.partition(".layers.")
    return f"{before}.layers.{after.partition('.')[0]}"
