"""The CPU with the operations of `async_rl.shared.cpu.exact`: what `train.exact` chooses.

Forward is computed by them; backward is that of the ordinary kernels, on the same values.
"""

from async_rl.shared.cpu import exact
from async_rl.shared.cpu.reproducible import use_reproducible_products
from trainer.devices import cpu
from trainer.devices.cpu import BACKEND, DEVICE, MODEL_OPTIONS
from trainer.devices.cpu_ops import exact_linear
from trainer.devices.exact_attention import ExactAttention
from trainer.devices.layer_ops import LayerOps

__all__ = ["ATTENTION", "BACKEND", "DEVICE", "LAYER_OPS", "MODEL_OPTIONS", "prepare"]

LAYER_OPS = LayerOps(
    rms_norm=exact.rms_norm,
    linear=exact_linear,
    matmul=exact.matmul,
    log_normalizer=exact.log_normalizer_of,
    swiglu=exact.swiglu,
    merge=exact.merge,
    exact=True,
)
ATTENTION = ExactAttention()


def prepare() -> None:
    """As `cpu.prepare`.

    Raises:
        ConfigError: this processor's products are not those that exact mode needs.
    """
    use_reproducible_products()
    cpu.prepare()
