"""Faults of engines that public threads know: by config.json, in the weights, in the requests that reach an engine, or
in its answers. `FAULTS` has for each the cause that an audit is to name; `Setting` plants it in the embedded engine,
and `audited_vllm.py` in vLLM.

The checkpoint of an audit is `sound`; `older` is the one of the step before.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.audit_wrappers import kept_prefixes, one_of_two, other_template
from tests.support.audited_engine import ASGI, asked, audited_engine, edited, with_config
from tests.support.tiny_model import make_tiny_model

STEP = 0.05
"""By so much of itself a weight of the step before is another: far more than a step of training, and far less than
makes another model."""
RANK, ALPHA = 4, 8.0
WINDOW = 24
ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

Model = Any


@dataclass(frozen=True, slots=True)
class Fault:
    """`cause`: as the audit is to name it. `change` makes what the engine has of the sound checkpoint's model."""

    cause: str
    family: str = "qwen3"
    size: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine's config.json, otherwise than the checkpoint's."""
    change: Callable[[Model, "Setting"], None] = lambda model, setting: None
    wrap: Callable[["Setting"], Callable[[Any], ASGI]] | None = None
    arguments: tuple[str, ...] = ()
    dtype: str = "float32"
    temperature: float | None = None
    """The only one that the audit asks for."""
    needs: tuple[str, ...] = ()
    """Of "before", "adapter", "older adapter", "update"."""


@dataclass(frozen=True)
class Setting:
    """The files of one audit, in a directory of their own."""

    directory: Path
    fault: Fault

    @property
    def size(self) -> Mapping[str, Any]:
        return self.fault.size

    @property
    def sound(self) -> Path:
        return self.directory / "sound"

    @property
    def older(self) -> Path:
        return self.directory / "older"

    def make(self) -> "Setting":
        make_tiny_model(self.sound, self.fault.family, **self.size)
        model = AutoModelForCausalLM.from_pretrained(self.sound, dtype=torch.float32)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                parameter.mul_(1 + STEP * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(self.older)
        for number, name in enumerate(("adapter", "older adapter")):
            if name in self.fault.needs:
                save_adapter(self.sound, self.directory / name, seed=number)
        return self

    @cached_property
    def served(self) -> Path:
        """The checkpoint by the engine's config.json."""
        config = self.fault.config
        return with_config(self.sound, self.directory / "served", **config) if config else self.sound

    def engine(self) -> AbstractContextManager[str]:
        """The engine with the fault; its URL."""
        fault = self.fault
        wrap = fault.wrap(self) if fault.wrap else lambda app: app
        arguments = ("--dtype", fault.dtype, *fault.arguments)
        return audited_engine(self.served, *arguments, change=lambda model: fault.change(model, self), wrap=wrap)

    def older_engine(self) -> AbstractContextManager[str]:
        """Another engine, with the weights of the step before."""
        return audited_engine(self.older, "--dtype", self.fault.dtype)

    def options(self, url: str) -> dict[str, Any]:
        """Of `trainer.audit.audit.Options`."""
        needs = self.fault.needs
        before = self.older if "before" in needs else None
        return {
            "engine": url,
            "checkpoint": str(self.sound),
            "dtype": self.fault.dtype,
            "temperature": self.fault.temperature,
            "adapter": self.directory / "adapter" if "adapter" in needs else None,
            "before": self.directory / "older adapter" if "older adapter" in needs else before,
            "update_via": f"touch {self.directory / 'updated'}" if "update" in needs else None,
        }


def scale_head(checkpoint: Path, sureness: float) -> None:
    """Makes a model sure of no token (0), as its logits are constant, up to nearly all."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] *= sureness
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})


def save_adapter(base: Path, directory: Path, seed: int = 0) -> None:
    """Random adapters of all linear layers, as peft has them."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            for factor, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                values = 0.08 * torch.randn(shape, generator=generator)
                factors[f"base_model.model.{name}.lora_{factor}.weight"] = values
    directory.mkdir()
    save_file(factors, directory / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in factors})
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(content))


def add_adapter(model: Model, directory: Path, share: Callable[[str], float] = lambda name: 1.0) -> None:
    """Merges saved adapters, of each layer so much."""
    factors = load_file(directory / "adapter_model.safetensors")
    for name, module in model.named_modules():
        if f"base_model.model.{name}.lora_A.weight" in factors:
            a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
            module.weight += (share(name) * ALPHA / RANK * (b @ a)).to(module.weight.dtype)


def stale(*parts: str) -> Callable[[Model, Setting], None]:
    """Tensors with one of `parts` in their names are those of the step before."""

    def change(model: Model, setting: Setting) -> None:
        older = dict(AutoModelForCausalLM.from_pretrained(setting.older, dtype=torch.float32).named_parameters())
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.copy_(older[name])

    return change


def _untied(model: Model, setting: Setting) -> None:
    older = AutoModelForCausalLM.from_pretrained(setting.older, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(older.lm_head.weight.to(model.lm_head.weight.dtype))


def _tied(model: Model, setting: Setting) -> None:
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)


def _exchanged(first: str, second: str) -> Callable[[Model, Setting], None]:
    def change(model: Model, setting: Setting) -> None:
        own = {name: parameter for name, parameter in model.named_parameters() if first in name}
        for name, parameter in own.items():
            other = model.get_parameter(name.replace(first, second))
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)

    return change


def _in_pairs(model: Model, setting: Setting) -> None:
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            size = model.config.head_dim
            rows = torch.arange(parameter.shape[0]).view(-1, 2, size // 2).transpose(1, 2).flatten()
            parameter.copy_(parameter[rows])


class _Bfloat16Head(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.bfloat16(), self.weight.bfloat16()).float()


def _bfloat16_head(model: Model, setting: Setting) -> None:
    model.lm_head = _Bfloat16Head(model.lm_head.weight)


def _rounded(levels: int) -> Callable[[Model, Setting], None]:
    """Whole numbers with one scale for each output; in four bits one for each 32 weights."""

    def change(model: Model, setting: Setting) -> None:
        for name, parameter in model.named_parameters():
            if "_proj" in name and parameter.ndim == 2:
                rows = parameter.float() if levels > 7 else parameter.float().reshape(-1, 32)
                scale = rows.abs().amax(-1, keepdim=True) / levels
                parameter.copy_(((rows / scale).round() * scale).reshape(parameter.shape))

    return change


def _fp8(part: str) -> Callable[[Model, Setting], None]:
    def change(model: Model, setting: Setting) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                scale = parameter.float().abs().amax(-1, keepdim=True) / 448
                parameter.copy_((parameter.float() / scale).to(torch.float8_e4m3fn).float() * scale)

    return change


def _weights_in_bfloat16(model: Model, setting: Setting) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def _noise(part: str) -> Callable[[Model, Setting], None]:
    def change(model: Model, setting: Setting) -> None:
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.mul_(1 + torch.randn(parameter.shape, generator=generator))

    return change


def adapted(
    share: Callable[[str], float] = lambda name: 1.0, name: str = "adapter"
) -> Callable[[Model, Setting], None]:
    return lambda model, setting: add_adapter(model, setting.directory / name, share)


def _params(**values: Any) -> Callable[[Setting], Callable[[Any], ASGI]]:
    """Sampling parameters otherwise than they were asked for."""

    def edit(path: str, body: dict[str, Any]) -> None:
        if "sampling_params" in body:
            body["sampling_params"] |= values

    return lambda setting: asked(edit)


def _prompts(edit_ids: Callable[[list[int]], list[int]]) -> Callable[[Setting], Callable[[Any], ASGI]]:
    def edit(path: str, body: dict[str, Any]) -> None:
        if "token_ids" in body:
            body["token_ids"] = edit_ids(body["token_ids"])

    return lambda setting: asked(edit)


def _text_tokens(edit_ids: Callable[[list[int]], list[int]]) -> Callable[[Setting], Callable[[Any], ASGI]]:
    def edit(path: str, body: dict[str, Any]) -> None:
        for choice in body.get("choices", ()):
            if choice.get("prompt_token_ids"):
                choice["prompt_token_ids"] = edit_ids(choice["prompt_token_ids"])

    return lambda setting: edited(edit)


def _padded(rows: int) -> Callable[[Model, Setting], None]:
    def change(model: Model, setting: Setting) -> None:
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.lm_head.weight[-8:] = 0.0

    return change


AS_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False}
"""An engine that takes a model for one of the family from which it is derived."""
RAW = ("--logprobs-mode", "raw_logprobs")
TIED = {"tied": True}
BEFORE = ("before",)
ADAPTER = ("adapter",)

FAULTS: dict[str, Fault] = {
    "the weights of the step before": Fault("stale every tensor", change=stale(""), needs=BEFORE),
    "one layer old": Fault(
        "stale model.layers.1", change=stale(".layers.1."), needs=BEFORE, size={"num_hidden_layers": 4}
    ),
    "one class old": Fault("stale down", change=stale("down_proj"), needs=BEFORE),
    "two classes old": Fault(
        "stale k and q",
        change=stale("q_proj", "k_proj"),
        needs=BEFORE,
    ),
    "an old embedding": Fault("stale embedding", change=stale("embed_tokens"), needs=BEFORE),
    "a tied head untied": Fault("tied head untied (stale head)", size=TIED, change=_untied, needs=BEFORE),
    "an untied head tied": Fault("untied head tied", change=_tied),
    "gate and up exchanged": Fault("gate and up exchanged", change=_exchanged("gate_proj", "up_proj")),
    "k and v exchanged": Fault("k and v exchanged", change=_exchanged("k_proj", "v_proj")),
    "rope of neighbours": Fault("rope pairs interleaved", change=_in_pairs),
    "no q and k norms": Fault("q and k norms missing", config=AS_LLAMA),
    "no biases": Fault("biases missing", "qwen2", config=AS_LLAMA),
    "a head in bfloat16": Fault("head in bfloat16", change=_bfloat16_head),
    "a head in fp8": Fault("head in fp8", change=_fp8("lm_head")),
    "weights in bfloat16": Fault("weights in bfloat16", change=_weights_in_bfloat16),
    "int8 for bfloat16": Fault("weights in int8", change=_rounded(127), dtype="bfloat16"),
    "fp8 for bfloat16": Fault("weights in fp8", change=_fp8("_proj"), dtype="bfloat16"),
    "four bits for bfloat16": Fault("weights in 4 bits", change=_rounded(7), dtype="bfloat16"),
    "adapters never loaded": Fault("adapters: none of them", needs=ADAPTER),
    "alpha for alpha / rank": Fault("adapters: all multiplied by 4", change=adapted(lambda _: 4.0), needs=ADAPTER),
    "half of alpha": Fault("adapters: all multiplied by 0.5", change=adapted(lambda _: 0.5), needs=ADAPTER),
    "half of the targets": Fault(
        "adapters: all but those of ", change=adapted(lambda name: float("mlp" not in name)), needs=ADAPTER
    ),
    "one layer without adapters": Fault(
        "adapters: all but those of model.layers.1",
        change=adapted(lambda name: float(".layers.1." not in name)),
        needs=ADAPTER,
        size={"num_hidden_layers": 4},
    ),
    "adapters of the step before": Fault(
        "adapters: an older version", change=adapted(name="older adapter"), needs=("adapter", "older adapter")
    ),
    "rope scaling dropped": Fault(
        "rope scaling ignored",
        size={"rope_parameters": YARN},
        config={"rope_parameters": ROPE},
    ),
    "another rope factor": Fault(
        "rope scaling of factor 8", size={"rope_parameters": YARN}, config={"rope_parameters": {**YARN, "factor": 8.0}}
    ),
    "another rope theta": Fault(
        "rope theta 10000", size={"rope_parameters": {**ROPE, "rope_theta": 3e5}}, config={"rope_parameters": ROPE}
    ),
    "a window ignored": Fault(
        "window ignored", "mistral", size={"sliding_window": WINDOW}, config={**AS_LLAMA, "sliding_window": None}
    ),
    "a window one short": Fault(
        f"window of {WINDOW - 1}", "mistral", size={"sliding_window": WINDOW}, config={"sliding_window": WINDOW - 1}
    ),
    "prefixes kept over an update": Fault(
        "prefix cache kept over the update",
        wrap=lambda s: kept_prefixes(s.older, s.sound, s.directory / "updated"),
        needs=("before", "update"),
    ),
    "a temperature that the report lacks": Fault(
        "draws at a lower temperature than reported", wrap=_params(temperature=0.8), arguments=RAW
    ),
    "top-p that the report lacks": Fault("draws cut by top_p 0.9", wrap=_params(top_p=0.9), arguments=RAW),
    "top-k that the report lacks": Fault("draws cut by top_k 20", wrap=_params(top_k=20), arguments=RAW),
    "log-probs of raw logits": Fault("raw log-probs", arguments=RAW),
    "a temperature that is ignored": Fault("temperature ignored", wrap=_params(temperature=1.0)),
    "a temperature twice": Fault("log-probs of another temperature", wrap=_params(temperature=0.5)),
    "BOS ahead of each prompt": Fault("BOS added", size={"bos_token_id": 2}, wrap=_prompts(lambda ids: [2, *ids])),
    "a prompt's first token lost": Fault("first token dropped", wrap=_prompts(lambda ids: ids[1:])),
    "another tokenizer": Fault("tokenizer mismatch", wrap=_text_tokens(lambda ids: [*ids[:3], ids[3] + 1, *ids[4:]])),
    "another chat template": Fault("chat template drift", wrap=lambda s: other_template(s.sound)),
    "a padded vocabulary": Fault("padded vocabulary drawn", size={"vocab_size": 88}, change=_padded(96)),
    "end tokens ignored": Fault("end token ignored", wrap=_params(ignore_eos=True)),
    "one of two engines old": Fault(
        "one of several workers: stale every tensor",
        wrap=lambda s: one_of_two(s.older_engine()),
        temperature=1.0,
        needs=BEFORE,
    ),
    "a matrix with noise": Fault("other weights", change=_noise("layers.0.mlp.down_proj")),
}
"""By a name that says what it is."""
