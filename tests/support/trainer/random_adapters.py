"""Adapters as peft writes them, all of whose factors are random."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from async_rl.config.adapter_section import ALL_LINEAR, AdapterSection

RANK, ALPHA = 3, 5
ALL, ATTENTION = (ALL_LINEAR,), ("q_proj", "k_proj", "v_proj", "o_proj")


def random_adapters(model: Path, path: Path, targets: tuple[str, ...] = ALL) -> AdapterSection:
    """Writes a peft directory for a model; returns the settings that start from it."""
    names: Any = ALL_LINEAR if targets == ALL else list(targets)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM")
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(str(path))
    return AdapterSection.model_validate({"rank": RANK, "alpha": ALPHA, "targets": targets, "path": path})
