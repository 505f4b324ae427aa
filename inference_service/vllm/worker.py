"""Methods added to vLLM's workers by `--worker-extension-cls`; a trainer calls them through /collective_rpc."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

from async_rl.shared.weights.fingerprint import Stream, TensorSpec, base_digest
from async_rl.shared.weights.nccl_version import nccl_version


def digest_of_files(model: Path, names: Sequence[str], dtype: torch.dtype) -> str:
    """`base_digest` of these tensors of a checkpoint, each converted to `dtype`; of those that are there."""

    def tensors() -> Stream:
        for file in sorted(model.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in set(names) & set(opened.keys()):
                    tensor = opened.get_tensor(name).to(dtype)
                    yield TensorSpec(name, str(dtype).removeprefix("torch."), tuple(tensor.shape)), tensor

    return base_digest(tensors())


class WorkerExtension:
    """Mixed into vLLM's worker class; the names of the methods are those of `async_rl.shared.protocol.inference`.

    vLLM refuses an extension with a callable that its worker already has.
    """

    weight_transfer_engine: Any
    vllm_config: Any
    noted_version_of_weights = "default"
    digest_of_base: tuple[tuple[str, ...], str] | None = None
    """(The names that were asked for last, their digest)."""

    def weight_fingerprint(self) -> str | None:
        """Fingerprint of the last weight stream that arrived completely; None before the first."""
        fingerprint: str | None = self.weight_transfer_engine.fingerprint
        return fingerprint

    def base_digest(self, *names: str) -> str | None:
        """Of the weights `names` in the files of the model, in the dtype in which vLLM computes with them; None if it
        has received others since.

        What its loader made of them the trainer finds by log-probs.
        """
        if self.weight_transfer_engine.receiver.has_whole_weights:
            return None
        if self.digest_of_base is None or self.digest_of_base[0] != names:
            model = self.vllm_config.model_config
            place = Path(model.model)
            if not place.is_dir():
                place = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
            self.digest_of_base = names, digest_of_files(place, names, model.dtype)
        return self.digest_of_base[1]

    def adapter_directory(self) -> str | None:
        """Where the adapters that came last are, as peft saves them; None if whole weights came since, or nothing."""
        adapters = self.weight_transfer_engine.receiver.adapters
        return None if adapters is None else str(adapters.directory)

    def engine_options(self) -> str:
        """The start options of the engine that affect how it loads weights."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        lora = self.vllm_config.lora_config
        return (
            f"{model.dtype}, quantization {model.quantization}, tensor parallel {parallel.tensor_parallel_size}, "
            f"pipeline parallel {parallel.pipeline_parallel_size}"
            + ("" if lora is None else f", adapters up to rank {lora.max_lora_rank} in {lora.lora_dtype}")
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
