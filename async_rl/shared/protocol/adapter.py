"""Adapters as peft's files name them, which is how they are published alone, and what identifies a publish of them."""

import hashlib
from collections.abc import Collection
from typing import Final

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
A, B = "lora_A", "lora_B"

BASE_DIGEST: Final = "base_xxh3"
"""Key of the metadata of a file of adapters: the digest of all weights beside which they were trained."""
BASE_SHAPE: Final = "base_shape"
"""Sizes and features that its config.json says, as JSON: the same weights may be another model with another one."""

BASE_SAMPLE: Final = "base_sample_blake2b"
"""The same of what each of these tensors begins with, which is read quickly (`preflight.weight_files`)."""


def factor_name(layer: str, factor: str) -> str:
    """The name of a factor, `A` or `B`, of a linear layer such as "model.layers.0.self_attn.q_proj"."""
    return f"{PREFIX}{layer}.{factor}.weight"


def adapter_fingerprint(stream: str, base: str, scales: Collection[float]) -> str:
    """That of adapters with this fingerprint of their stream: also of the base below them, by its digest, and of what
    they are multiplied by, which is one number for all of a sound engine."""
    return hashlib.blake2b(f"{base}|{sorted(scales)}|{stream}".encode(), digest_size=16).hexdigest()
