"""Lets megatron-core 0.16.1 run on a CPU with gloo: the one file of substitutions, used only when `cpu` is chosen.

Megatron queries `torch.cuda` for its device and its random state in many places and has no setting for another device.
Its modules get a substitute for the name `torch` that returns the CPU where CUDA is requested; torch itself is
unchanged for all other code, except for two methods of Tensor and some of the optimizers. All of this can be removed
once Megatron takes its device from its configuration; a newer megatron-core needs the list checked again.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from async_rl.shared.cpu.memory import keep_freed_memory
from async_rl.shared.cpu.products import matmul
from trainer.devices.cpu_attention import CPUAttention
from trainer.devices.cpu_ops import linear, rms_norm, rotary
from trainer.devices.layer_ops import LayerOps

BACKEND = "gloo"
DEVICE = torch.device("cpu")
MODEL_OPTIONS: dict[str, Any] = {
    "use_cpu_initialization": True,
    # Both are fused CUDA kernels.
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
}

LAYER_OPS = LayerOps(rms_norm=rms_norm, rotary=rotary, linear=linear, matmul=matmul)
ATTENTION = CPUAttention()

_MEGATRON_MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.token_dispatcher",
)
"""Megatron modules that the trainer imports; they and their imports are loaded before the substitute is installed."""


class _StandIn(ModuleType):
    """A module with some names replaced; it copies the original's other names, and looks up later ones there."""

    def __init__(self, original: ModuleType, **replaced: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update({**vars(original), **replaced})
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@functools.cache
def prepare() -> None:
    """Applies the substitutions to this process; later calls do nothing."""
    keep_freed_memory()
    cuda = _StandIn(
        torch.cuda,
        # Model parameters, gradient buffers and receive buffers are created on the current device.
        current_device=_current_device,
        synchronize=_do_nothing,
        # The random states of dropout and of recomputation are kept per CUDA device.
        manual_seed=_manual_seed,
        get_rng_state=_get_rng_state,
        # The dispatcher of tokens to experts copies its counts to the host on a separate stream.
        Stream=_Stream,
        current_stream=_Stream,
        stream=nullcontext,
    )
    # Gradient norm, loss scale and token counts are made with device="cuda".
    factories = {name: _made_on_cpu(getattr(torch, name)) for name in ("tensor", "zeros", "ones", "empty")}
    stand_in = _StandIn(torch, cuda=cuda, **factories)
    *_, megatron_random, token_dispatcher = load_megatron()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            if vars(module).get("torch") is torch:
                vars(module)["torch"] = stand_in
            _undo_compilation(module)
    vars(token_dispatcher)["maybe_move_tensor_to_cpu"] = _to_host
    vars(megatron_random).update(_get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state)
    _spare_compiler()
    # The mixed-precision optimizer sorts parameters by the names of their CUDA tensor types.
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # type: ignore[method-assign]  # a substitution
    # A tied embedding's copy on the last pipeline stage is moved to CUDA before the first stage fills it.
    torch.Tensor.cuda = _stay  # type: ignore[assignment,method-assign]  # a substitution, called without arguments


def load_megatron() -> list[ModuleType]:
    """Imports the modules of Megatron that the trainer uses, in the order of `_MEGATRON_MODULES`."""
    with _without_compilation():
        return list(map(import_module, _MEGATRON_MODULES))


class _Stream:
    """Substitute for CUDA streams and events where execution is in order; all instances are equal."""

    def wait_stream(self, stream: "_Stream") -> None:
        return None

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)


@contextmanager
def _without_compilation() -> Iterator[None]:
    """Megatron sends small functions through torch.compile where they are defined; inside, they stay as they are.

    Here they would need a C++ compiler, and torch's part of it, which the first call loads, is a tenth of what a rank
    imports. Megatron's switch for it (`megatron.core.jit`) can be reached only after that import.
    """
    original = torch.compile
    torch.compile = _not_compiled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def _not_compiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Takes the place of torch.compile, as a decorator with or without options."""
    return _not_compiled if function is None else function


def _spare_compiler() -> None:
    """Optimizers run as torch runs them uncompiled, without loading its compiler.

    Their methods load it at their first call, to be marked for it, and `Adam.step` at each: a second of every start.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(torch.optim.Optimizer, name).__wrapped__
        # Where torch keeps the marked function after the first call.
        method.__dynamo_disable = method
    # Uncompiled, the wrapper of `step` does no more than this: no step here is differentiable.
    step = torch.no_grad()(torch.optim.Adam.step.__wrapped__)  # type: ignore[attr-defined]  # by functools.wraps
    torch.optim.Adam.step = step  # type: ignore[method-assign]  # a substitution


def _undo_compilation(module: ModuleType) -> None:
    """Undoes the compilation of functions defined before the CPU was chosen, when something else imported Megatron."""
    for name, value in list(vars(module).items()):
        if hasattr(value, "_torchdynamo_orig_callable"):
            setattr(module, name, value._torchdynamo_orig_callable)


def _made_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = DEVICE
        return factory(*args, **kwargs)

    return make


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(tensor, *args, **kwargs)
        is_cpu_name = isinstance(answer, str) and tensor.device.type == "cpu"
        return answer.replace("torch.", "torch.cuda.", 1) if is_cpu_name else answer

    return type_


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """A count per expert, as the collectives take it: Megatron does not convert tensors on a CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _stay(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _current_device() -> torch.device:
    return DEVICE


def _do_nothing(*_: Any) -> None:
    return None


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)
