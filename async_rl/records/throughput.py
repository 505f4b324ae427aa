"""Tokens per second and device, and the model FLOPs behind them; pure functions for `recorder`.

`tpspd` is called after the measure of arXiv 2511.18871 (tokens per second per device): trained tokens over the time of
the iteration and the devices of both pools. Model FLOPs are those of the matrix products that training needs, however
they are computed: a prompt once per group, as it is trained, no recomputation, and no optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.method.group_proof import GroupProof
from async_rl.shared.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the FLOPs of a forward pass follow from.

    Attributes:
        num_layer_parameters: weights of matrix products that each row passes, of experts those that it uses.
        num_output_parameters: weights of the output layer, which only sampled tokens pass.
        attention_width: layers that attend to all tokens * heads * head dimension.
        windowed_width: the same of layers that attend to the last `window` tokens.
        state_products: of gated delta nets, products of a row with their states: three of each of a state's numbers.
        num_adapter_parameters: weights of all adapters; with any, all other weights are frozen.
    """

    num_layer_parameters: int
    num_output_parameters: int
    attention_width: int
    windowed_width: int = 0
    window: int | None = None
    state_products: int = 0
    num_adapter_parameters: int = 0

    @classmethod
    def of(cls, shape: ModelShape, num_adapter_parameters: int = 0) -> "ModelSize":
        """Matrix products only: norms, biases, convolutions and the look-up of embeddings take few FLOPs.

        Of a gated delta net (arXiv 2412.06464) those of its recurrence, with a state of key dimension * value
        dimension for each value head: it is read by the key, what it becomes is added, and it is read by the query.
        Computing by chunks takes more.
        """
        # Of the product of queries and keys, and of that with values.
        width = shape.num_heads * (shape.head_dim + shape.value_dim) // 2
        num_windowed, delta = len(shape.windowed_layers), shape.delta
        state = len(delta.layers) * delta.num_value_heads * delta.key_dim * delta.value_dim if delta else 0
        return cls(
            num_layer_parameters=shape.attention_products + shape.feed_forward_products,
            num_output_parameters=shape.hidden_size * shape.vocab_size,
            attention_width=(shape.num_attention_layers - num_windowed) * width,
            windowed_width=num_windowed * width,
            window=shape.window,
            state_products=3 * state,
            num_adapter_parameters=num_adapter_parameters,
        )

    def forward_flops(self, row: GroupProof) -> float:
        """Of one group: 2 * (layer and state products * rows + output parameters * sampled tokens) + 4 * width * pairs.

        Pairs of a query and a key of n tokens in a row: n^2 / 2, or w^2 / 2 + (n - w) * w in a window of w < n. Of a
        group with p prompt tokens and rollouts of r tokens: pairs(p) + sum(pairs(p + r) - pairs(p)). Adapters are left
        out.
        """
        prompt, sampled = row.num_prompt_tokens, row.num_response_tokens

        def pairs(window: int | None) -> float:
            def of(num_tokens: int) -> float:
                free = num_tokens if window is None else min(num_tokens, window)
                return free**2 / 2 + (num_tokens - free) * free

            return of(prompt) + sum(of(prompt + length) - of(prompt) for length in row.rollout_lengths)

        products = (self.num_layer_parameters + self.state_products) * (prompt + sampled)
        attention = self.attention_width * pairs(None) + self.windowed_width * pairs(self.window)
        return 2.0 * (products + self.num_output_parameters * sampled) + 4.0 * attention

    def adapter_flops(self, row: GroupProof) -> float:
        """Of the adapters' own products in the same pass."""
        return 2.0 * self.num_adapter_parameters * (row.num_prompt_tokens + row.num_response_tokens)

    def backward_flops(self, row: GroupProof) -> float:
        """Twice those of the forward pass, for gradients of inputs and of weights, which frozen ones do not have."""
        twice = 2.0 * (self.forward_flops(row) + self.adapter_flops(row))
        if not self.num_adapter_parameters:
            return twice
        rows = row.num_prompt_tokens + row.num_response_tokens
        return twice - 2.0 * (self.num_layer_parameters * rows + self.num_output_parameters * row.num_response_tokens)


@dataclass(frozen=True, slots=True)
class TrainingPool:
    """The training pool, as far as throughput depends on it.

    Attributes:
        num_devices: training ranks, which have a device each.
        model: None where other models than the policy's copies take part: a teacher or a critic.
        num_frozen: copies of the policy (reference, old policy) that run forward only.
        peak_flops: of one device, per second, in the run's dtype; None if it is not known.
    """

    num_devices: int
    model: ModelSize | None = None
    num_frozen: int = 0
    peak_flops: float | None = None

    def model_flops(self, rows: Sequence[GroupProof], num_untrained: int) -> float | None:
        """FLOPs of training the groups; those of `num_untrained` of them, which run forward only, are taken as mean."""
        if self.model is None:
            return None
        forward, adapters, backward = (
            sum(map(each, rows))
            for each in (self.model.forward_flops, self.model.adapter_flops, self.model.backward_flops)
        )
        trained_share = 1.0 - num_untrained / len(rows)
        return forward * (1.0 + self.num_frozen) + adapters + backward * trained_share

    def mfu(self, model_flops: float | None, train_s: float) -> float | None:
        """model_flops / (train_s * devices * peak): the share of the peak that forward and backward passes reach."""
        if model_flops is None or self.peak_flops is None or train_s <= 0:
            return None
        return model_flops / (train_s * self.num_devices * self.peak_flops)


def tpspd(num_tokens: int, seconds: float, num_training: int | None, num_inference: int | None) -> float | None:
    """Trained tokens per second and device of both pools; None if the devices of a pool are not known."""
    if num_training is None or num_inference is None or seconds <= 0:
        return None
    return num_tokens / (seconds * (num_training + num_inference))
