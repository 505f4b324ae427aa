"""What the checkpoint says of recorded tokens: transformers' own model, computed in float32, weights as the engine is
meant to hold them.

Shape legend: N sampled tokens in the order of their samples, V vocabulary, K other temperatures (`proof.draws.POWERS`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from async_rl.checks.preflight.adapter import read_saved_section, require_form
from async_rl.checks.preflight.model import ModelFiles
from async_rl.checks.preflight.weight_files import metadata_of, weights_sample
from async_rl.errors import ConfigError
from async_rl.method.proof.draws import POWERS
from async_rl.shared.cpu.products import use_faster_products
from async_rl.shared.protocol.adapter import BASE_SAMPLE, WEIGHTS_FILE, A, B, factor_name
from trainer.audit.engine import Sample

BATCH_TOKENS = 2048
"""Rows of one forward pass: logits of so many are at most a gigabyte at a vocabulary of 128k."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LogitsEdit = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors of one layer, float32: y = W x + scale B A x."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def delta(self) -> torch.Tensor:
        return self.scale * (self.b @ self.a)


class ExactModel:
    """A model whose weights hypotheses change for a while (`hypotheses.py`)."""

    def __init__(self, model: PreTrainedModel, device: str = "cpu") -> None:
        self.model: Any = model.eval().requires_grad_(False).to(device)
        use_faster_products(self.model)
        self.device = device
        self.adapters: dict[str, Adapter] = {}
        """By the layer's name, such as "model.layers.0.self_attn.q_proj"; already in its weights."""

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def parameters(self) -> dict[str, torch.Tensor]:
        """By Hugging Face name; a tied head under its own name, too."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def layer(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def logits(self, samples: Sequence[Sample]) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of a sample, logits ahead of each of its tokens, float32 [n, V]), shortest samples first.

        Sequences are padded at their ends, which no causal model looks at.
        """
        order = sorted(range(len(samples)), key=lambda i: len(samples[i].prompt) + len(samples[i].tokens))
        while order:
            longest = len(samples[order[0]].prompt) + len(samples[order[0]].tokens)
            batch = [order.pop(0)]
            while order:
                longest = max(longest, len(samples[order[0]].prompt) + len(samples[order[0]].tokens))
                if longest * (len(batch) + 1) > BATCH_TOKENS:
                    break
                batch.append(order.pop(0))
            rows = [(*samples[i].prompt, *samples[i].tokens[:-1]) for i in batch]
            width = max(map(len, rows))
            ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
            first = min(len(samples[i].prompt) for i in batch) - 1
            with torch.no_grad():
                made = self.model(ids, use_cache=False, logits_to_keep=width - first).logits.float()
            for i, logits_LV in zip(batch, made, strict=True):
                start = len(samples[i].prompt) - 1 - first
                yield i, logits_LV[start : start + len(samples[i].tokens)]

    def logprobs(
        self, samples: Sequence[Sample], temperature: float | None = None, edit: LogitsEdit | None = None
    ) -> torch.Tensor:
        """Log-probs of the samples' tokens at a temperature, by default their own; float64 [N]."""
        parts: dict[int, torch.Tensor] = {}
        for i, logits_nV in self.logits(samples):
            logits_nV = logits_nV if edit is None else edit(logits_nV)
            parts[i] = token_logprobs(logits_nV, samples[i].tokens, temperature or samples[i].temperature)
        return joined(parts)


def token_logprobs(logits_nV: torch.Tensor, tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """float64 [n]"""
    logprobs_nV = (logits_nV / temperature).log_softmax(-1)
    return logprobs_nV.gather(1, torch.tensor(tokens, device=logits_nV.device)[:, None])[:, 0].double().cpu()


def log_ratios(logprobs_nV: torch.Tensor, own_n: torch.Tensor) -> torch.Tensor:
    """How much likelier each token is at other temperatures, as `trainer.model.logprobs.response_logprobs` has it for
    one that is to train: log p^c / sum p^c - log p, float64 [K, n]; of all log-probs, and the tokens' own."""
    rows = [(c - 1) * own_n - (c * logprobs_nV).logsumexp(-1) for c in POWERS]
    return torch.stack(rows).double().cpu()


def reported(samples: Sequence[Sample]) -> torch.Tensor:
    """What the engine said, float64 [N]."""
    return torch.tensor([logprob for sample in samples for logprob in sample.logprobs], dtype=torch.float64)


def joined(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parts[i] for i in sorted(parts)]) if parts else torch.empty(0, dtype=torch.float64)


def load_exact(files: ModelFiles, dtype: str, device: str = "cpu") -> ExactModel:
    """The model of a checkpoint, its weights rounded to `dtype`.

    Raises:
        ConfigError: transformers does not read it, or it has not all of its weights.
    """
    if missing := files.without_weights():
        raise missing
    if files.config.get("quantization_config"):
        raise ConfigError(
            f"{files.named} is quantized (quantization_config of its config.json): name the checkpoint that was trained"
        )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # With this option it returns two, which its types do not say.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(files.directory), dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        model, told = loaded
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError) as error:
        why = " ".join(str(error).split())[:500]
        raise ConfigError(f"{files.named} is no model that transformers loads: {why}; save it whole") from error
    if absent := sorted(told["missing_keys"]):
        raise ConfigError(
            f"{files.named} has no {absent[0]!r}, nor {len(absent) - 1} others that its config.json asks for: save the "
            "model whole, or correct config.json"
        )
    if dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return ExactModel(model, device)


def meant_dtype(files: ModelFiles) -> str:
    """The dtype in which an engine computes by default: that which config.json says; float16 counts as bfloat16."""
    named = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float32" if named == "float32" else "bfloat16"


def read_adapter(directory: Path, exact: ExactModel, files: ModelFiles, option: str) -> dict[str, Adapter]:
    """The adapters in a directory of peft's, by the layers of the model that they belong to.

    Raises:
        ConfigError: it is no such directory, or the adapters are of another model, or of a form that is not held.
    """
    section, _ = read_saved_section(directory)
    named = f"{option} {str(directory)!r}"
    before = metadata_of(directory / WEIGHTS_FILE).get(BASE_SAMPLE)
    assert files.directory is not None, "a checkpoint on this host"
    if before and before != (now := weights_sample(files.directory)):
        raise ConfigError(
            f"{named} was trained beside weights whose beginnings have the digest {before}, and those of {files.named} "
            f"have {now}: name the base that it belongs to"
        )
    factors = load_file(directory / WEIGHTS_FILE)
    linear = {name: module for name, module in exact.model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = {}
    for name, module in linear.items():
        a, b = (factors.pop(factor_name(name, factor), None) for factor in (A, B))
        if a is None and b is None:
            continue
        shapes = [None if factor is None else list(factor.shape) for factor in (b, a)]
        if shapes != [[module.out_features, section.rank], [section.rank, module.in_features]]:
            raise ConfigError(
                f"{named} has factors B {shapes[0]} and A {shapes[1]} of {name}, which is "
                f"[{module.out_features}, {module.in_features}] in {files.named}, and its rank r is {section.rank}: "
                "these adapters are another model's, or damaged"
            )
        assert a is not None and b is not None, "both have a shape"
        found[name] = Adapter(a.float().to(exact.device), b.float().to(exact.device), section.scale)
    require_form(directory, list(found))
    if factors or not found:
        left = next(iter(factors), "no factors")
        raise ConfigError(
            f"{named} has {left!r}, which is no layer of {files.named}: these adapters are another model's"
        )
    return found


@contextmanager
def changed(exact: ExactModel, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Other values for parameters, by name. A head that is tied gets its own for that time."""
    parameters = exact.parameters()
    kept = []
    try:
        for name, value in values.items():
            place, _, leaf = name.rpartition(".")
            module, own = exact.layer(place), parameters[name]
            assert value.shape == own.shape, f"{name}: {list(value.shape)} for {list(own.shape)}"
            kept.append((module, leaf, own))
            setattr(module, leaf, torch.nn.Parameter(value.to(own), requires_grad=False))
        yield
    finally:
        for module, leaf, own in reversed(kept):
            setattr(module, leaf, own)


def with_tied(exact: ExactModel, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values under all names that a tied tensor has."""
    names: dict[int, list[str]] = {}
    for name, parameter in exact.parameters().items():
        names.setdefault(id(parameter), []).append(name)
    own = exact.parameters()
    return {other: value for name, value in values.items() for other in names[id(own[name])]}


@contextmanager
def configured(exact: ExactModel, changes: Mapping[str, Any]) -> Iterator[None]:
    """The model that another config.json would make of the same weights.

    Raises:
        ValueError, and others of transformers: there is no such model.
    """
    config = AutoConfig.for_model(**{**exact.model.config.to_dict(), **changes})
    config._attn_implementation = exact.model.config._attn_implementation
    own, device = exact.model, exact.device
    other: Any = type(own)(config).eval().requires_grad_(False).to(device)
    use_faster_products(other)
    for name, parameter in own.named_parameters(remove_duplicate=False):
        place, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(place), leaf, parameter)
    buffers = dict(own.named_buffers())
    for name, buffer in other.named_buffers():
        if name in buffers and "inv_freq" not in name:
            buffer.copy_(buffers[name])
    exact.model = other
    try:
        yield
    finally:
        exact.model = own
