"""Adapters for the two interfaces of vLLM's weight transfer engine, as mixins; `weight_engine.py` selects one.

vLLM 0.23 loads through a callback that its worker passes, and reloads layer by layer in the worker. Later releases pass
the model to the engine, which reloads it itself; some of them (0.26) still demand the sender's method of 0.23. Nothing
here needs vLLM.
"""

import inspect
from functools import cached_property
from typing import Any, ClassVar

import torch

from async_rl.shared.protocol.inference import InitInfo, UpdateInfo
from inference_service.vllm.weight_receiver import LoadWeights, WorkerReceiver


class Transfer:
    """Code shared by both interfaces. vLLM's class, a later base of the final class, sets `parallel_config`.

    vLLM constructs the infos with `init_info_cls(**body)`; a pydantic model refuses unknown fields with a ValueError,
    as vLLM expects.
    """

    init_info_cls: ClassVar[type[InitInfo]] = InitInfo
    update_info_cls: ClassVar[type[UpdateInfo]] = UpdateInfo
    parallel_config: Any

    @cached_property
    def receiver(self) -> WorkerReceiver:
        config = self.parallel_config
        return WorkerReceiver(config.data_parallel_index * config.world_size + config.rank)

    @property
    def fingerprint(self) -> str | None:
        return self.receiver.fingerprint

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.receiver.join(init_info)

    def shutdown(self) -> None:
        self.receiver.leave()

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        raise NotImplementedError("the trainer sends through async_rl.shared.weights.stream, not through vLLM's class")


class DenseUpdateInfo(UpdateInfo):
    """An update with the field that the worker of 0.23 reads: it supports sparse updates too."""

    update_kind: ClassVar[str] = "dense"


class LoadsThroughCallback(Transfer):
    """The interface of 0.23."""

    update_info_cls = DenseUpdateInfo

    def receive_weights(self, update_info: UpdateInfo, load_weights: LoadWeights) -> None:
        if update_info.adapter is not None:
            raise ValueError("this release of vLLM takes no adapters alone: set adapter.publish to 'merged'")
        self.receiver.load(update_info, load_weights)


class ReloadsModel(Transfer):
    """The interface of 0.26 to 0.32; `begin_reload` and `end_reload` are vLLM's layer-by-layer reload of a model.

    It begins with whole weights: adapters leave the model as it is.
    """

    model: Any
    model_config: Any
    vllm_config: Any
    is_reloading = False

    @staticmethod
    def begin_reload(model: torch.nn.Module) -> object:
        raise NotImplementedError

    @staticmethod
    def end_reload(model: torch.nn.Module, model_config: Any) -> object:
        raise NotImplementedError

    def start_weight_update(self) -> None:
        self.is_reloading = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.adapter is not None:
            _require_lora(self.vllm_config.lora_config, update_info.adapter.rank)
            self.receiver.load_adapters(update_info)
            return
        if not self.is_reloading:
            self.begin_reload(self.model)
            self.is_reloading = True
        self.receiver.load(update_info, self.model.load_weights)

    def finish_weight_update(self) -> None:
        if self.is_reloading:
            self.end_reload(self.model, self.model_config)


def form_of(base: type) -> type[LoadsThroughCallback] | type[ReloadsModel]:
    """The mixin for vLLM's `WeightTransferEngine`, chosen by its constructor: which release changed it is not known."""
    takes_model = "vllm_config" in inspect.signature(base.__init__).parameters  # type: ignore[misc]
    return ReloadsModel if takes_model else LoadsThroughCallback


def _require_lora(config: Any, rank: int) -> None:
    """
    Raises:
        ValueError: vLLM was not started for adapters of this rank; `config` is its `lora_config`.
    """
    if config is None or config.max_lora_rank < rank:
        started = "without --enable-lora" if config is None else f"with --max-lora-rank {config.max_lora_rank}"
        raise ValueError(
            f"adapters of rank {rank} were published, but this vLLM was started {started}: start it with -- "
            f"--enable-lora --max-lora-rank {rank} (or the next rank that it knows), or set adapter.publish to 'merged'"
        )
