"""One rank of `test_logprobs.py`, started by torchrun: its share of the vocabulary, and the results computed from it.

Arguments: file of the inputs, output directory.
"""

import sys
from pathlib import Path

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

from async_rl.config.trainer_section import TrainerSection
from trainer.devices import choose_device
from trainer.model import logprobs
from trainer.parallel import init_parallel


def main(inputs_file: str, out: Path) -> None:
    torch.set_num_threads(1)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection(tensor_parallel=2))
    inputs = torch.load(inputs_file, weights_only=False)
    logprobs.CHUNK_BYTES = inputs["chunk_bytes"]
    hidden_RH = inputs["hidden_RH"].requires_grad_()
    weight_VH = inputs["weight_VH"].chunk(2)[parallel.tp_rank].clone().requires_grad_()
    logprobs_N, entropy_N, log_ratios_KN = logprobs.response_logprobs(
        copy_to_tensor_model_parallel_region(hidden_RH),
        weight_VH,
        inputs["label_rows_N"],
        inputs["labels_N"],
        inputs["temperature"],
        judged=inputs["judged"],
    )
    logprobs_N.backward(inputs["dlogprobs_N"])
    assert log_ratios_KN is not None
    ratios = log_ratios_KN[:, inputs["judged"].index_N >= 0]
    results = (logprobs_N.detach(), entropy_N, ratios, hidden_RH.grad, weight_VH.grad)
    torch.save(results, out / f"rank{parallel.tp_rank}.pt")
    parallel.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
