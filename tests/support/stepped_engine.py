"""The embedded engine's parts of continuous batching, driven step by step."""

from copy import deepcopy

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inference_service.engine.delta_net import delta_net_of
from inference_service.engine.kernels import FASTEST, Kernels
from inference_service.engine.kv_store import KVStore
from inference_service.engine.sampling import sample_step
from inference_service.engine.schedule import Schedule, Work
from inference_service.engine.step import ModelStep

STATE_TOKENS = 40
"""What a state of gated delta nets counts as."""


class SteppedEngine:
    """With a copy of the model, and a store of `max_tokens`."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_tokens: int,
        max_running: int,
        prefill_tokens: int,
        kernels: Kernels = FASTEST,
    ) -> None:
        config = model.config
        self.step = ModelStep(deepcopy(model), kernels)
        self.store = KVStore(
            config.num_hidden_layers,
            config.num_key_value_heads,
            head_dim(config),
            torch.float32,
            torch.device("cpu"),
            max_tokens,
            kernels.width,
            self.step.routes.width,
            delta_net_of(config),
            STATE_TOKENS,
        )
        self.schedule = Schedule(self.store, max_running, prefill_tokens, kernels.is_exact)

    def run_step(self) -> None:
        self.compute(self.schedule.next())

    @torch.inference_mode()
    def compute(self, work: Work) -> None:
        drawing = self.step(work, self.store.generation)
        sequences = [run.sequence for run in drawing.runs]
        if not sequences:
            return
        samples = sample_step(drawing.logits, sequences, "processed_logprobs", "v")
        for run, sample in zip(drawing.runs, samples, strict=True):
            run.sequence.samples.append(sample)
            if not run.sequence.remaining_tokens:
                self.schedule.finish(run)


def head_dim(config: PreTrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):
        size = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return size
