"""A vLLM worker's end of a weight stream, without vLLM: classes of both forms of its base, and real weight groups."""

import json
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.errors import PublishError
from async_rl.shared.protocol.adapter import adapter_fingerprint
from async_rl.shared.protocol.inference import AdapterInfo, UpdateInfo
from async_rl.shared.weights.fingerprint import Fingerprint, TensorSpec, base_digest
from async_rl.shared.weights.store import StoreServer
from async_rl.shared.weights.stream import WeightGroup
from inference_service.engine_interface import RequestRefused
from inference_service.vllm.weight_adapters import LoadsThroughCallback, ReloadsModel, form_of
from inference_service.vllm.weight_receiver import WorkerReceiver, in_batches
from inference_service.vllm.worker import WorkerExtension, digest_of_files
from inference_service.weight_transfer.receiver import announced_specs

SECRET = "of this meeting" * 3
TIMEOUT_S = 20.0
BUCKET_BYTES = 64

Tensors = Sequence[tuple[str, torch.Tensor]]


class OldBase:
    """The form of vLLM 0.23."""

    def __init__(self, config: object, parallel_config: object, model: object) -> None:
        self.parallel_config = parallel_config


class NewBase:
    """The form of vLLM 0.32."""

    def __init__(self, config: object, vllm_config: Any, device: object, model: object) -> None:
        self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
        self.model, self.model_config = model, "a model config"


class MiddleBase(NewBase, ABC):
    """The form of vLLM 0.25.1, 0.26 and 0.27.1: that of 0.32, and still with the sender's method of 0.23."""

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None: ...


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, "float32", tuple(tensor.shape))


def weights() -> list[tuple[TensorSpec, torch.Tensor]]:
    names = ["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.10.a", "norm"]
    return [(spec(name, tensor), tensor) for name in names for tensor in [torch.randn(5, 3)]]


def update_of(stream: Sequence[tuple[TensorSpec, torch.Tensor]]) -> UpdateInfo:
    specs = [spec for spec, _ in stream]
    return UpdateInfo(
        names=[s.name for s in specs],
        dtype_names=[s.dtype_name for s in specs],
        shapes=[list(s.shape) for s in specs],
    )


class Sender:
    """Rank 0 of a group with `num_workers` others, whose end runs in a thread as a trainer's would."""

    def __init__(self, num_workers: int = 1, backend: str = "sockets") -> None:
        self.waits, self.has_received = False, threading.Event()
        self._backend = backend
        self._server = StoreServer("127.0.0.1", [SECRET] * num_workers)
        self.init_info = {
            "master_address": "127.0.0.1",
            "master_port": self._server.port,
            "secret": SECRET,
            "rank_offset": 1,
            "world_size": num_workers + 1,
            "backend": backend,
            "bucket_bytes": BUCKET_BYTES,
            "timeout_s": TIMEOUT_S,
        }
        self._world_size = num_workers + 1
        self.fingerprint: str | None = None

    def send(self, stream: Sequence[tuple[TensorSpec, torch.Tensor]]) -> threading.Thread:
        def run() -> None:
            group = WeightGroup(self._server.store(TIMEOUT_S), 0, self._world_size, self._backend, TIMEOUT_S)
            assert not group.wait_accepted(TIMEOUT_S)
            try:
                self.fingerprint = group.send(iter(stream), BUCKET_BYTES)
            except PublishError:
                pass  # A receiver that gave up closed the group.
            finally:
                # As a publish does, which ends when every instance has answered.
                self.has_received.wait(TIMEOUT_S if self.waits else 0.0)
                group.close()
                self._server.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def old_engine() -> tuple[Any, Callable[[Any, UpdateInfo], list[Tensors]]]:
    class Engine(form_of(OldBase), OldBase):  # type: ignore[misc]
        pass

    def receive(engine: Any, update: UpdateInfo) -> list[Tensors]:
        batches: list[Tensors] = []
        engine.receive_weights(update, load_weights=batches.append)
        return batches

    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    return Engine(None, parallel, None), receive


def new_engine(base: type = NewBase) -> tuple[Any, Callable[[Any, UpdateInfo], list[Tensors]]]:
    class Engine(form_of(base), base):  # type: ignore[misc]
        begin_reload = staticmethod(lambda model: model.calls.append("begin"))
        end_reload = staticmethod(lambda model, config: model.calls.append(config))

    def receive(engine: Any, update: UpdateInfo) -> list[Tensors]:
        engine.start_weight_update()
        engine.receive_weights(update)
        engine.finish_weight_update()
        assert (engine.model.calls.pop(0), engine.model.calls.pop()) == ("begin", "a model config")
        return engine.model.calls

    model = SimpleNamespace(calls=[])
    model.load_weights = model.calls.append
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    return Engine(None, SimpleNamespace(parallel_config=parallel), "cpu", model), receive


def test_the_form_of_the_base_class_is_told_by_its_constructor() -> None:
    assert (form_of(OldBase), form_of(NewBase)) == (LoadsThroughCallback, ReloadsModel)


@pytest.mark.parametrize(
    "make", [old_engine, partial(new_engine, MiddleBase), new_engine], ids=["0.23", "0.26", "0.32"]
)
@pytest.mark.parametrize("backend", ["sockets", "cpu_ipc"])
def test_an_engine_of_either_form_hands_every_tensor_to_the_loader_layer_by_layer(
    make: Callable[[], Any], backend: str
) -> None:
    engine, receive = make()
    sender, stream = Sender(backend=backend), weights()
    sender.waits = True
    thread = sender.send(stream)
    engine.init_transfer_engine(engine.init_info_cls(**sender.init_info))
    update = engine.update_info_cls(**update_of(stream).model_dump())
    batches = receive(engine, update)
    sender.has_received.set()
    thread.join(TIMEOUT_S)
    names = [[name for name, _ in batch] for batch in batches]
    assert names == [["embed"], ["layers.0.a", "layers.0.b"], ["layers.1.a"], ["layers.10.a"], ["norm"]]
    received = dict(pair for batch in batches for pair in batch)
    assert all(torch.equal(received[spec.name], tensor) for spec, tensor in stream)
    assert engine.fingerprint == sender.fingerprint is not None
    engine.shutdown()


def test_the_worker_of_0_23_finds_the_kind_of_update_that_it_asks_for() -> None:
    info = LoadsThroughCallback.update_info_cls(**update_of(weights()).model_dump())
    assert info.update_kind == "dense"


def test_workers_take_their_places_after_the_rank_offset() -> None:
    """Two workers of one instance: both must find their place for the group to form."""
    sender, stream = Sender(num_workers=2), weights()
    thread = sender.send(stream)
    loaded: dict[int, list[str]] = {0: [], 1: []}

    def work(rank: int) -> None:
        engine = type("Engine", (form_of(OldBase), OldBase), {})(
            None, SimpleNamespace(data_parallel_index=rank, world_size=1, rank=0), None
        )
        engine.init_transfer_engine(engine.init_info_cls(**sender.init_info))
        engine.receive_weights(update_of(stream), lambda batch: loaded[rank].extend(name for name, _ in batch))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in loaded]
    for each in threads:
        each.start()
    for each in (*threads, thread):
        each.join(TIMEOUT_S)
    assert loaded[0] == loaded[1] == [spec.name for spec, _ in stream]


def test_a_loader_that_refuses_a_tensor_ends_the_update_for_both_sides() -> None:
    receiver, sender, stream = WorkerReceiver(0), Sender(), weights()
    thread = sender.send(stream)
    receiver.join(LoadsThroughCallback.init_info_cls(**sender.init_info))

    def refuse(batch: Tensors) -> None:
        raise KeyError(batch[0][0])

    with pytest.raises(KeyError, match="embed"):
        receiver.load(update_of(stream), refuse)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert receiver.fingerprint is None
    with pytest.raises(PublishError, match="no weight group"):
        receiver.load(update_of(stream), lambda batch: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": []}, "equal lengths"),
        ({"names": ["a", "a"], "dtype_names": ["float32"] * 2, "shapes": [[1]] * 2}, "'a' is announced twice"),
        ({"dtype_names": ["floaty"]}, "'floaty'"),
        ({"dtype_names": ["nn"]}, "'nn'"),
        ({"stages": []}, "stages has 0 entries, and names 1"),
        ({"stages": [0, 1]}, "stages has 2 entries, and names 1"),
    ],
)
def test_an_announcement_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    update = UpdateInfo(**{"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], **change})
    with pytest.raises(RequestRefused, match=message):
        announced_specs(update)


def test_a_large_layer_comes_in_several_batches_and_a_large_tensor_alone() -> None:
    sizes = {"layers.0.a": 4, "layers.0.b": 4, "layers.0.c": 40, "layers.0.d": 4}
    stream = [(spec(name, torch.zeros(size)), torch.zeros(size)) for name, size in sizes.items()]
    batches = [[name for name, _ in batch] for batch in in_batches(stream, {}, max_bytes=32)]
    assert batches == [["layers.0.a", "layers.0.b"], ["layers.0.c"], ["layers.0.d"]]


def test_of_stages_beside_each_other_each_has_its_layers_in_batches() -> None:
    names = ["embed", "layers.2.a", "layers.0.a", "layers.2.b", "layers.0.b", "layers.3.a", "layers.1.a", "norm"]
    stages = {name: int(name == "norm" or name[-3] in "23") for name in names}
    stream = [(spec(name, torch.zeros(1)), torch.zeros(1)) for name in names]
    batches = [[name for name, _ in batch] for batch in in_batches(stream, stages)]
    assert batches == [
        *(["embed"], ["layers.2.a", "layers.2.b"], ["layers.0.a", "layers.0.b"]),
        *(["layers.3.a"], ["layers.1.a"], ["norm"]),
    ]


FACTORS = [
    (spec(name, tensor), tensor)
    for layer in ("0.self_attn.q_proj", "1.mlp.up_proj")
    for factor, tensor in (("lora_A", torch.ones(3, 5)), ("lora_B", torch.full((7, 3), 2.0)))
    for name in [f"base_model.model.model.layers.{layer}.{factor}.weight"]
]
BASE = "a" * 32


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (None, "started without --enable-lora: start it with -- --enable-lora --max-lora-rank 3"),
        (SimpleNamespace(max_lora_rank=1), "started with --max-lora-rank 1"),
        (SimpleNamespace(max_lora_rank=8), None),
    ],
)
def test_adapters_are_saved_for_vllm_and_the_model_stays_as_it_is(
    lora: object, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine, _ = new_engine()
    engine.vllm_config.lora_config = lora
    update = update_of(FACTORS).model_copy(update={"adapter": AdapterInfo(rank=3, alpha=6, base=BASE)})
    file = tmp_path / "factors.safetensors"
    save_file({each.name: tensor for each, tensor in FACTORS}, file)
    update = update.model_copy(update={"snapshot": str(file)})
    if said is not None:
        with pytest.raises(ValueError, match=said):
            engine.receive_weights(update)
        return
    for _ in range(3):
        engine.start_weight_update()
        engine.receive_weights(update)
        engine.finish_weight_update()
    assert engine.model.calls == [], "nothing was loaded"
    saved = engine.receiver.adapters
    assert len(list(tmp_path.glob("adapters-*"))) == 2, "the present ones and those before"
    config = json.loads((saved.directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, ["q_proj", "up_proj"])
    found = load_file(saved.directory / "adapter_model.safetensors")
    assert found.keys() == {each.name for each, _ in FACTORS}
    of_stream = Fingerprint()
    for each, tensor in FACTORS:
        of_stream.add(each, tensor.view(-1).view(torch.uint8))
    assert engine.fingerprint == adapter_fingerprint(of_stream.hexdigest(), BASE, {2.0})
    assert not engine.receiver.has_whole_weights


def test_the_base_of_a_server_is_what_its_files_hold_in_its_dtype(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(2), "left out": torch.randn(3)}
    save_file({"a": tensors["a"]}, tmp_path / "1.safetensors")
    save_file({"b": tensors["b"], "left out": tensors["left out"]}, tmp_path / "2.safetensors")
    rounded = [(TensorSpec(n, "bfloat16", tuple(tensors[n].shape)), tensors[n].bfloat16()) for n in ("b", "a")]
    assert digest_of_files(tmp_path, ["a", "b"], torch.bfloat16) == base_digest(rounded)
    assert digest_of_files(tmp_path, ["a", "b"], torch.float32) != base_digest(rounded)
    assert digest_of_files(tmp_path, ["a"], torch.bfloat16) != base_digest(rounded)


def test_a_worker_answers_for_the_names_that_are_asked_whatever_was_asked_before(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    worker = WorkerExtension()
    worker.weight_transfer_engine = SimpleNamespace(receiver=SimpleNamespace(has_whole_weights=False))
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path), dtype=torch.float32))
    for names in ((), ("a", "b"), ("a",), ("a", "b")):
        assert worker.base_digest(*names) == digest_of_files(tmp_path, names, torch.float32)
    assert worker.base_digest() != worker.base_digest("a", "b")
