"""How far a layout in bfloat16 may be from one rank in float32, weight by weight, derived, not tuned.

Both start from the same weights W, which bfloat16 holds exactly, and take two steps on gradients G1 and G2.

1. *One rounding* to bfloat16, which keeps 8 significant bits, changes a value by at most u = 2^-8 of itself.
2. *A gradient* is the result of K such roundings in sequence: every operation between a weight and the loss rounds its
   result once in forward and once in backward. To first order they add up, so that the error of a gradient is at most K
   u |G| (Frobenius norms; operations are assumed to propagate errors like values). Micro-batches and ranks are summed
   in float32, which adds nothing significant here.
3. *A step of Adam* is lr m / (sqrt(v) + eps), with m and v the bias-corrected means of gradients and of their squares.
   Gradients are clipped to a norm of 1, and `eps` is 100 here: the step is within 1% of lr m / eps, and its change with
   m and sqrt(v) is within 2% of that, too. (With the usual tiny eps a step is lr times a sign, whatever the gradient's
   norm, and would not reveal a lost share of it.) So the error of a step is at most 1.02 K u lr / eps times |G1| for
   the first step, and times the mean of |G1| and |G2| in m for the second. Both follow from the steps S1 and S2 of the
   rank in float32: lr / eps G1 = S1, and lr / eps G2 = S2 after its mean with G1 is undone.
4. *The exported weights* are rounded once more: u |W|.

Together: |W' - W''| <= 1.02 K u lr / eps (|G1| + mean(|G1|, |G2|)) + u |W|. A weight that lacks one of two ranks'
shares of its gradients is off by about half of its change; K u is 0.21 for dense models of two layers, and 0.29 with
experts.

The choice of experts is discontinuous, so it has no such bound: these models use all of their experts.
"""

import torch

from trainer.policy.optimizer import BETA1

UNIT_ROUNDOFF = 2.0**-8
LEARNING_RATE, EPS = 200.0, 100.0
ADAM = 1.02

ROUNDINGS_PER_LAYER = 12
"""Input norm, projection to q/k/v, their norm, rotary embedding, attention, its projection, residual; norm, first
product, activation, second product, residual."""
ROUNDINGS_OF_EXPERTS = 5
"""Router logits, the weights of experts, the product with them, their sum, the sum over ranks."""
ROUNDINGS_AROUND_LAYERS = 3
"""Embedding, final norm, logits."""

MORE_ROUNDINGS = {
    # The norms of what both halves of a layer add; the scaled embedding.
    "gemma3_text": (2, 1),
    # Multipliers of what both halves add, and of embedding and logits.
    "granite": (2, 2),
    # Queries by their position.
    "ministral3": (1, 0),
    # Latents between two products; the sum with what all rows pass.
    "deepseek_v3": (2, 0),
    "glm4_moe": (1, 0),
    # Of a gated delta net convolution, rule, norm and gate, which are one more than attention's; of attention its gate.
    # The gate of what all rows pass, and the sum with that.
    "qwen3_next": (3, 0),
    "qwen3_5_text": (1, 0),
    "qwen3_5_moe_text": (3, 0),
}
"""In each layer and around all, of families that have more."""


def roundings(num_layers: int, experts: bool, family: str = "") -> int:
    """K, for forward and backward."""
    in_layer, around = MORE_ROUNDINGS.get(family, (0, 0))
    per_layer = ROUNDINGS_PER_LAYER + ROUNDINGS_OF_EXPERTS * experts + in_layer
    return 2 * (num_layers * per_layer + ROUNDINGS_AROUND_LAYERS + around)


def bound(num_roundings: int, path: list[torch.Tensor]) -> float:
    """Largest distance from the end of `path`: a weight at the start and after each of two steps in float32."""
    start, middle, end = path
    # The weights of both gradients in the bias-corrected mean of the second step.
    first, second = BETA1 / (1 + BETA1), 1 / (1 + BETA1)
    gradient1 = middle - start
    gradient2 = (end - middle - first * gradient1) / second
    size1, size2 = float(gradient1.norm()), float(gradient2.norm())
    steps = size1 + first * size1 + second * size2
    return UNIT_ROUNDOFF * (ADAM * num_roundings * steps + float(end.norm()))
