"""The plugin that adds async-rl's weight transport to vLLM; entry point group `vllm.general_plugins`.

vLLM calls `register` in its API server, its engine core and every worker, in some processes more than once.
"""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from inference_service.vllm.command import BACKEND
from inference_service.vllm.worker_answers import read_all_answers

_registered = False


def register() -> None:
    """Registers the transport in this process, and patches vLLM; a second call does nothing."""
    global _registered
    if not _registered:
        module = "inference_service.vllm.weight_engine"
        WeightTransferEngineFactory.register_engine(BACKEND, module, "WeightStreamEngine")
        read_all_answers(MultiprocExecutor)
        _registered = True
