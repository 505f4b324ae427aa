"""Stands in for the distribution torch_npu, over the emulated device; its fused operators are those of `FakeTorchNPU`.

torch imports it by itself, as it does the real one. The environment variables are set by `environment.py`.
"""

import importlib.util
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

__version__ = torch.__version__.split("+")[0]

LIBRARY, DEVICES, CAPACITY = "EMULATED_NPU_LIBRARY", "EMULATED_NPU_DEVICES", "EMULATED_NPU_BYTES"
LATE = "EMULATED_NPU_LATE"
"""Which queued copies are late: a seed, or "always", or "never"."""
FAULTS = "EMULATED_NPU_FAULTS"
"""As in "lost:200@async_rl.trainer,oom:17": at the 200th kernel of that program, and the 17th allocation of any. After
a "hang" whoever waits for the device waits for ever."""
SHARED = "EMULATED_NPU_SHARED"
"""A file through which processes know what all of them have on the same devices; without it each has its own."""
RECORDS = "EMULATED_NPU_RECORDS"
"""A folder: each process writes a file of its waits there. With it a fault strikes in one process only."""

HERE = str(Path(__file__).parent)
MAX_FRAMES = 16


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("emulated_npu", os.environ[LIBRARY])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = _load()

waits: Counter[str] = Counter()
"""How often the host waited, by kind: "item", "copy to host", "blocking copy to device", "synchronize stream", ..."""


def _on_wait(kind: str) -> None:
    waits[kind] += 1
    if RECORDS not in os.environ:
        return
    with Path(os.environ[RECORDS], f"{os.getpid()}.waits").open("a") as file:
        file.write(f"{kind} at {' < '.join(_callers())}\n")


def _callers() -> Iterator[str]:
    """The functions that are running, the innermost first, without torch's and the emulator's."""
    frame, found = sys._getframe(1), 0
    while (frame := frame.f_back) is not None and found < MAX_FRAMES:  # type: ignore[assignment]
        path = frame.f_code.co_filename
        if "site-packages/torch/" not in path and not path.startswith((HERE, "<")):
            found += 1
            yield frame.f_code.co_qualname


def _on_fault(kind: str) -> bool:
    """Whether it strikes here: in a run, in the first process that comes to it."""
    if RECORDS not in os.environ:
        return True
    try:
        Path(os.environ[RECORDS], f"struck.{kind}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _faults(text: str) -> dict[str, int]:
    parts = [part.partition("@") for part in text.split(",") if part]
    own = [fault for fault, _, program in parts if not program or program in sys.orig_argv]
    return {kind: int(number) for kind, _, number in (fault.partition(":") for fault in own)}


def _num_devices() -> int:
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return int(os.environ.get(DEVICES, "8")) if visible is None else len(visible.split(","))


def configure(late: str = "0", faults: str = "", capacity: int = 64 << 30) -> None:
    """Sets what the environment says at the start, in a process of a test."""
    native.init(_num_devices(), capacity, late, _faults(faults), _on_wait, _on_fault)


configure(os.environ.get(LATE, "0"), os.environ.get(FAULTS, ""), int(os.environ.get(CAPACITY, 64 << 30)))
if SHARED in os.environ:
    _visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES") or ",".join(map(str, range(_num_devices())))
    native.share_usage(os.environ[SHARED], list(map(int, _visible.split(","))))
backend_registration.rename_privateuse1_backend("npu")


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(native.current_device()) if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> "Stream":
        return super().__new__(cls, torch.device("npu", _index(device)))


class Event(torch.Event):
    def __new__(cls, *_: Any, **__: Any) -> "Event":
        return super().__new__(cls, torch.device("npu", _index()))


class _Device:
    """`with torch.npu.device(index)`."""

    def __init__(self, index: Any) -> None:
        self._index = _index(index)

    def __enter__(self) -> None:
        self._before = native.current_device()
        native.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        native.set_device(self._before)


@contextmanager
def _stream(chosen: torch.Stream | None) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(before if chosen is None else chosen)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _memory(name: str) -> Callable[..., int]:
    return lambda device=None: int(native.memory(_index(device))[name])


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    used = native.memory(_index(device))
    return used["capacity"] - used["allocated"] - used["others"], used["capacity"]


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="Ascend910B2",
        total_memory=native.memory(_index(device))["capacity"],
        multi_processor_count=24,
        major=9,
        minor=0,
    )


# torch.npu: the random state is the host's. No function stands for two names, which torch's compiler would refuse.
npu = types.ModuleType("torch_npu.npu")
vars(npu).update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    init=lambda *_, **__: None,
    _lazy_init=lambda *_, **__: None,
    _is_in_bad_fork=lambda: False,
    _lazy_call=lambda function, **_: function(),
    device_count=native.device_count,
    current_device=native.current_device,
    set_device=lambda index: native.set_device(_index(index)),
    device=_Device,
    get_device_name=lambda device=None: _properties(device).name,
    get_device_properties=_properties,
    get_device_capability=lambda device=None: (9, 0),
    memory_allocated=_memory("allocated"),
    max_memory_allocated=_memory("peak"),
    memory_reserved=_memory("reserved"),
    max_memory_reserved=_memory("reserved"),
    mem_get_info=_mem_get_info,
    reset_peak_memory_stats=lambda device=None: native.forget_peak(_index(device), False),
    empty_cache=lambda: native.forget_peak(_index(), True),
    synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
    Stream=Stream,
    Event=Event,
    current_stream=lambda device=None: torch.accelerator.current_stream(_index(device)),
    default_stream=lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=20),
    set_stream=torch.accelerator.set_stream,
    stream=_stream,
    is_current_stream_capturing=lambda: False,
    manual_seed=lambda *_, **__: None,
    manual_seed_all=lambda *_, **__: None,
    initial_seed=torch.initial_seed,
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    default_generators=(torch.default_generator,) * 8,
    mstx=types.SimpleNamespace(range_start=lambda *_: 0, range_end=lambda *_: None),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
)
torch._register_device_module("npu", npu)
backend_registration.generate_methods_for_privateuse1_backend()


# Memory of a device in several processes, with the types of torch_npu/csrc/ipc/StorageSharing.cpp. Each process that
# has it mapped counts it as its own.


def _share_npu_(storage: torch.UntypedStorage) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    file = os.memfd_create("emulated-npu")
    native.share(data, file, True)
    return storage.device.index, f"{os.getpid()}/fd/{file}".encode(), storage.nbytes(), 0, b"/none", 0, bytes(8), False


def _new_shared_npu(*given: Any) -> torch.UntypedStorage:
    assert list(map(type, given)) == [int, bytes, int, int, bytes, int, bytes, bool], given
    device, handle, num_bytes, *_ = given
    data = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("npu", device))
    file = os.open(f"/proc/{handle.decode()}", os.O_RDWR)
    native.share(data, file, False)
    os.close(file)
    return data.untyped_storage()


storage_type: Any = torch.UntypedStorage
storage_type._share_npu_, storage_type._new_shared_npu = _share_npu_, staticmethod(_new_shared_npu)


# hccl


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return native.hccl(dist.ProcessGroupGloo(store, rank, size, timeout))


class ProcessGroupHCCL:
    """The group as torch_npu makes it without torch.distributed's registry."""

    class Options:
        _timeout: Any = dist.distributed_c10d.default_pg_timeout

        def __init__(self) -> None:
            self.hccl_config: dict[str, int] = {}

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._group = _hccl(store, rank, size, options._timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def abort_hccl_comm(self, reason: str) -> None:
        self._group.abort()


dist.Backend.register_backend("hccl", _hccl, devices=["npu"])


# Fused operators


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.index = x.device.index
        return torch.Tensor(native.host_view(x))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return native.adopt(gradient, ctx.index)


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: int) -> Any:
        return native.adopt(x, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return native.host_view(gradient), None


def on_host(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator on tensors of the device, computed on the host."""

    def call(*args: Any, **kwargs: Any) -> Any:
        index = native.current_device()

        def down(x: torch.Tensor) -> Any:
            if x.device.type != "npu":
                raise RuntimeError(f"{name}: expected all tensors on npu, found one on {x.device}")
            return _ToHost.apply(x) if x.requires_grad else native.host_view(x)  # type: ignore[no-untyped-call]

        def up(x: torch.Tensor) -> Any:
            return _ToDevice.apply(x, index) if x.requires_grad else native.adopt(x, index)  # type: ignore[no-untyped-call]

        given = tree_map_only(torch.Tensor, down, (list(args), kwargs))
        return tree_map_only(torch.Tensor, up, operator(*given[0], **given[1]))

    return call


def _fused(name: str) -> Callable[..., Any]:
    def operator(*args: Any, **kwargs: Any) -> Any:
        from tests.support.devices.fake_torch_npu import FakeTorchNPU

        return getattr(FakeTorchNPU(), name)(*args, **kwargs)

    return on_host(name, operator)


npu_fusion_attention = _fused("npu_fusion_attention")
npu_fusion_attention_grad = _fused("npu_fusion_attention_grad")
npu_rms_norm = _fused("npu_rms_norm")
npu_swiglu = _fused("npu_swiglu")
npu_rotary_mul = _fused("npu_rotary_mul")
npu_grouped_matmul = _fused("npu_grouped_matmul")

unsupported_dtype = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]

_C, _native = types.ModuleType("torch_npu._C"), types.ModuleType("torch_npu._C._distributed_c10d")
vars(_native)["ProcessGroupHCCL"] = ProcessGroupHCCL
vars(_C)["_distributed_c10d"] = _native
sys.modules |= {module.__name__: module for module in (npu, _C, _native)}
