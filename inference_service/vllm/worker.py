"""Methods added to vLLM's workers by `--worker-extension-cls`; a trainer calls them through /collective_rpc."""

from typing import Any

from async_rl.shared.weights.nccl_version import nccl_version


class WorkerExtension:
    """Mixed into vLLM's worker class; the names of the methods are those of `async_rl.shared.protocol.inference`.

    vLLM refuses an extension with a callable that its worker already has.
    """

    weight_transfer_engine: Any
    vllm_config: Any
    noted_version_of_weights = "default"

    def weight_fingerprint(self) -> str | None:
        """Fingerprint of the last weight stream that arrived completely; None before the first."""
        fingerprint: str | None = self.weight_transfer_engine.fingerprint
        return fingerprint

    def engine_options(self) -> str:
        """The start options of the engine that affect how it loads weights."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        return (
            f"{model.dtype}, quantization {model.quantization}, tensor parallel {parallel.tensor_parallel_size}, "
            f"pipeline parallel {parallel.pipeline_parallel_size}"
        )

    def nccl_version(self) -> str:
        """The NCCL and torch of this worker."""
        return nccl_version()

    def note_weight_version(self, version: str) -> None:
        """Stores the version of the weights now loaded, for a vLLM that stores none itself."""
        self.noted_version_of_weights = version

    def noted_weight_version(self) -> str:
        """The version stored last."""
        return self.noted_version_of_weights
