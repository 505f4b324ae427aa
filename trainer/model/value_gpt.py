"""A GPT that gives values of states instead of log-probs of tokens: the critic's model.

The value of a state is that of the row whose logits would give its token (`Labels`), so policy and critic read the same
micro-batches. The head is one vector of the hidden size, whole on every tensor-parallel rank of the last stage.

Shape legend: T fed rows, R rows with logits, N sampled tokens, H hidden size.
"""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from async_rl.shared.model_shape import ModelShape
from trainer.batching.shared_prompt import Labels
from trainer.model.gpt import SharedPromptGPT
from trainer.model.logprobs import Scores
from trainer.parallel import Parallel


class ValueGPT(SharedPromptGPT):
    """This rank's part; the head stands where a GPT has its output layer, under the same name."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, parallel: Parallel) -> None:
        assert shape.gives_values, "the shape is one of a model that gives log-probs"
        super().__init__(config, shape, parallel)
        if self.post_process:
            self.output_layer = ValueHead(shape.hidden_size, config.params_dtype)

    def rows_for_logits(self, hidden_T1H: torch.Tensor) -> torch.Tensor:
        """The last stage's hidden rows as the head takes them, [T, H]; each rank's gradient of them is the whole."""
        if self.config.sequence_parallel:
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        return hidden_T1H[:, 0]

    def scores(self, rows_TH: torch.Tensor, labels: Labels, temperature: float, with_entropy: bool = True) -> Scores:
        """The value before each sampled token, with gradient, float32 (float64 if the rows are) [N]; nothing else."""
        values_R = self.output_layer(rows_TH.index_select(0, labels.logit_rows_R))
        return values_R.index_select(0, labels.label_rows_N), None, None


class ValueHead(torch.nn.Module):
    """A linear layer with one output, computed in float32 at least; in bfloat16 close values would become equal."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R]."""
        wide = torch.promote_types(hidden_RH.dtype, torch.float32)
        values_R: torch.Tensor = hidden_RH.to(wide) @ self.weight[0].to(wide)
        return values_R
