"""The critic: its model, optimizer and passes; what it adds to the loss, and advantages of tokens for the policy.

The critic has the policy's layout and reads the policy's micro-batches. It trains on each right before the policy does:
its weights change with the policy's step only, so with one step per batch the values of these passes are those of the
weights that a separate pass before them would have used. With several steps a frozen model has the batch's old values.

The value of a state is that of the row whose logits would give its token (`Labels`), so policy and critic read the same
micro-batches. The head is one vector of the hidden size, whole on every tensor-parallel rank of the last stage.

Shape legend: N sampled tokens of one micro-batch, T fed rows, R rows with logits, H hidden size.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from async_rl.checks.preflight.model import CRITIC, find_checkpoint, read_shape
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.algorithms import Responses
from async_rl.method.algorithms.gae import AdvantageEstimation
from async_rl.shared.model_shape import ModelShape
from trainer.batching.shared_prompt import Labels, MicroBatch
from trainer.devices.host_copies import to_host
from trainer.forward_backward import Pass
from trainer.hf.adapters import add_adapters
from trainer.hf.weights import load_hf_weights
from trainer.loss_sums import sampled_logprobs
from trainer.model.gpt import RankModel, SharedPromptGPT, build_model
from trainer.model.logprobs import Scores, of_all_labels
from trainer.parallel import Parallel
from trainer.policy.frozen_adapters import FrozenAdapters
from trainer.policy.frozen_model import FrozenModel
from trainer.policy.optimizer import PolicyOptimizer
from trainer.policy.tri_model import Frozen, with_gradient_sums


class ValueGPT(SharedPromptGPT):
    """This rank's part; the head stands where a GPT has its output layer, under the same name."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, parallel: Parallel, chunk: int = 0) -> None:
        assert shape.gives_values, "the shape is one of a model that gives log-probs"
        super().__init__(config, shape, parallel, chunk)
        if self.post_process:
            self.output_layer = ValueHead(shape.hidden_size, config.params_dtype)

    def rows_for_logits(self, hidden_T1H: torch.Tensor) -> torch.Tensor:
        """The last stage's hidden rows as the head takes them, [T, H]; each rank's gradient of them is the whole."""
        rows_T1H: torch.Tensor = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        return rows_T1H[:, 0]

    def scores(self, rows_TH: torch.Tensor, labels: Labels, temperature: float, with_entropy: bool = True) -> Scores:
        """The value before each sampled token, with gradient, float32 (float64 if the rows are) [N]; nothing else."""
        values_R = self.output_layer(rows_TH.index_select(0, labels.logit_rows_R))
        values_N = values_R.index_select(0, labels.label_rows_N)
        return of_all_labels((values_N, None, None), labels, self.row_sharers)


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


ResponsesOf = Callable[[MicroBatch, torch.Tensor], Responses]
"""(micro-batch, a tensor whose dtype and device to use) -> its responses, with the rewards as advantages."""

PREFIX = "critic/"

ROUNDING = 1e-6
"""Of sums of squares in float32. Returns are values plus advantages, so those of equal rewards differ by less than this
share, as squares."""


class Critic:
    """One rank's part of the critic; all ranks call its methods in the same order."""

    def __init__(
        self,
        algorithm: AlgorithmSection,
        optimizer: OptimizerSection,
        train: TrainSection,
        policy_checkpoint: Path,
        dtype: torch.dtype,
        parallel: Parallel,
        trainer: TrainerSection,
        adapter: AdapterSection,
    ) -> None:
        """Loads the model named by `critic_path`, or the policy's; its head is 0 unless the checkpoint has one.

        Several steps per batch need `old`, a second model.

        Raises:
            ConfigError: there is no such checkpoint.
        """
        options = algorithm.critic
        checkpoint = policy_checkpoint if options.critic_path is None else find_checkpoint(options.critic_path)
        shape = read_shape(checkpoint, CRITIC).as_critic()
        model = build_model(shape, dtype, parallel, trainer, ValueGPT)
        load_hf_weights(model, checkpoint)
        self.old: Frozen | None = None
        if adapter.is_given:
            # Of its own, also where the policy's begin with those of a file.
            add_adapters(model, adapter)
        if train.steps_per_batch > 1 and adapter.is_given:
            self.old = FrozenAdapters(model, keeps=True)
        elif train.steps_per_batch > 1:
            frozen = build_model(shape, dtype, parallel, trainer, ValueGPT)
            frozen.load_state_dict(model.state_dict())
            self.old = FrozenModel(frozen, trainer.frozen_weights, parallel.device.DEVICE)
        self.model = with_gradient_sums(model, parallel, trainer)
        own = optimizer.model_copy(update={"learning_rate": options.critic_learning_rate})
        self.optimizer = PolicyOptimizer(own, train, self.model, parallel.shares_gradients)
        self._estimation = AdvantageEstimation(algorithm)
        self._terms: list[torch.Tensor] = []

    @property
    def value_model(self) -> RankModel:
        """The model without its gradient buffers."""
        model: RankModel = self.model.module
        return model

    def train(
        self,
        passes: Iterable[Pass],
        responses_of: ResponsesOf,
        ref_logprobs: Sequence[list[torch.Tensor] | None],
        old_values: Sequence[list[torch.Tensor] | None],
    ) -> list[list[torch.Tensor]]:
        """Adds the gradient of the value loss of a window; returns each pass's advantages, [N] per micro-batch.

        Lists are empty before the last pipeline stage.

        Args:
            ref_logprobs: those of each pass's micro-batches under the reference, if there is one.
            old_values: the values of each pass's micro-batches under `old`, if there is one.
        """
        advantages: list[list[torch.Tensor]] = []
        for a_pass, *of_others in zip(passes, ref_logprobs, old_values, strict=True):
            advantages.append([])
            loss_of = functools.partial(self._loss_of, a_pass, responses_of, of_others, advantages[-1])
            a_pass.train(self.model, loss_of)
        return advantages

    def finish_gradients(self, num_tokens: float) -> None:
        """Makes means over the batch's sampled tokens of the sums; waits for all replicas."""
        finalize_model_grads([self.model])
        self.model.scale_gradients(1.0 / num_tokens)

    def totals(self) -> dict[str, float]:
        """Sums since the last step, to be added over replicas, for `metrics`. Waits once for the device."""
        if not self._terms:
            return {}
        sums = torch.stack(list(to_host([term.double() for term in self._terms]))).sum(0).tolist()
        return dict(zip((PREFIX + name for name in _TERMS), sums, strict=True))

    @staticmethod
    def metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
        """From the sums of all replicas: means over sampled tokens, and the share of the returns' variance explained.

        The latter is not a number where all returns are equal, up to `ROUNDING`.
        """
        loss, values, *of_returns, error, squared_error = (sums[PREFIX + name] / num_tokens for name in _TERMS)
        mean_return, squared_return = of_returns
        variance, left = squared_return - mean_return**2, squared_error - error**2
        differ = variance > ROUNDING * (squared_return + squared_error)
        return {
            "value_loss": loss,
            "value": values,
            "explained_variance": 1 - left / variance if differ else float("nan"),
        }

    def refresh_old(self) -> None:
        """Copies the weights to the model of old values, where there is one: a batch begins."""
        if self.old is not None:
            self.old.copy_from(self.value_model)

    def discard(self) -> None:
        """Drops what has been accumulated since the last step."""
        self.model.zero_grad_buffer()
        self._terms.clear()

    def _loss_of(
        self,
        a_pass: Pass,
        responses_of: ResponsesOf,
        others: Sequence[list[torch.Tensor] | None],
        advantages: list[torch.Tensor],
        number: int,
        values_N: torch.Tensor,
        *_: torch.Tensor | None,
    ) -> torch.Tensor:
        """The value loss of a pass's micro-batch, summed; appends its advantages to `advantages`."""
        micro_batch = a_pass.micro_batches[number]
        ref_logprobs_N, old_values_N = (given[number] if given else None for given in others)
        if old_values_N is None:
            old_values_N = values_N.detach()
        responses = responses_of(micro_batch, values_N)
        rewards_N = self._estimation.rewards(responses, sampled_logprobs(micro_batch, values_N), ref_logprobs_N)
        advantages_N, returns_N = self._estimation.of(rewards_N, old_values_N, responses)
        loss_N = self._estimation.value_loss(values_N, old_values_N, returns_N)
        terms = (loss_N.detach(), old_values_N, returns_N, returns_N.square(), advantages_N, advantages_N.square())
        self._terms.append(torch.stack([term.sum() for term in terms]))
        advantages.append(advantages_N)
        return loss_N.sum()


_TERMS = ("loss", "values", "returns", "squared_returns", "errors", "squared_errors")
"""What is summed over sampled tokens; a return less its value, an error, is the token's advantage."""
