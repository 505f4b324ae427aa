"""The engine class that vLLM's workers create: it receives weights over async-rl's transport. Imported by vLLM only."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from inference_service.vllm.weight_adapters import ReloadsModel, form_of

if TYPE_CHECKING:
    Form = ReloadsModel
else:
    Form = form_of(WeightTransferEngine)


class WeightStreamEngine(Form, WeightTransferEngine):
    """A weight transfer engine of the installed vLLM."""

    begin_reload = staticmethod(initialize_layerwise_reload)

    @staticmethod
    def end_reload(model: torch.nn.Module, model_config: Any) -> None:
        finalize_layerwise_reload(model, model_config)
        pack_tied_heads(model)
        pack_experts(model)


def pack_experts(model: torch.nn.Module) -> None:
    """On CPU: packs the weights of experts again. For vLLM 0.32, which packs them when the model is loaded only.

    A reload leaves them in the order of the checkpoint where the kernel expects its own: every expert computes with
    scrambled weights.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts) and module.w13_weight.device.type == "cpu":
            kernel = getattr(module.quant_method, "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)


def pack_tied_heads(model: torch.nn.Module) -> None:
    """On CPU: packs the output head's copy of its weight again. For vLLM 0.32, which does not do so itself.

    A head that is tied to the embedding receives no tensors in a reload. Its weight shares the embedding's memory and
    is up to date, but vLLM computes with a copy that it packed when the model was loaded.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight.device.type == "cpu":
            method = module.quant_method
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)
