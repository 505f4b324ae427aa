"""Receives one weight update, as a worker of an instance does: `python -m tests.support.stream_receiver ...`."""

import sys
from multiprocessing.connection import Client, Connection

import torch

from async_rl.errors import PublishError
from async_rl.shared.weights.fingerprint import Fingerprint, TensorSpec
from async_rl.shared.weights.messages import ALONE_BYTES
from async_rl.shared.weights.store import join_rendezvous
from async_rl.shared.weights.stream import WeightGroup

HOST = "127.0.0.1"
SECRET = "of this meeting"
KEY = b"of these pipes"


def make_tensors() -> list[tuple[TensorSpec, torch.Tensor]]:
    """Odd sizes and mixed dtypes, so that tensors start at unaligned bytes of a bucket."""
    torch.manual_seed(3)
    tensors = {
        "a": torch.randn(7, 3),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.randint(0, 255, (3,), dtype=torch.uint8),
        "d": torch.randn(11, 2, dtype=torch.float64),
        "e": torch.randn(64, 64),
        "f": torch.tensor(2.5),
        # Large enough to travel alone.
        "g": torch.randn(ALONE_BYTES // 4 + 1),
        "h": torch.randn(3),
    }
    return [
        (TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), tensor)
        for name, tensor in tensors.items()
    ]


def receive(
    port: int, rank: int, world_size: int, bucket_bytes: int, timeout_s: float, backend: str, pipe: Connection
) -> None:
    """A worker: receives one update and answers whether every byte is right, and its fingerprint; or what ended it.

    An even rank receives into places of its own, for all but one tensor, of which one is not contiguous.
    """
    group = WeightGroup(join_rendezvous(HOST, port, SECRET, timeout_s), rank, world_size, backend, timeout_s)
    command = pipe.recv()
    if command == "die":
        return
    group.announce(rank)
    if command.startswith("endless"):
        pipe.send(problem_of_endless(group, bucket_bytes, fails=command == "endless, fails"))
        return
    expected = {spec.name: tensor for spec, tensor in make_tensors()}
    places = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if name != "e"}
    places["d"] = places["d"].t().contiguous().t()
    into = places if rank % 2 == 0 else {}
    fingerprint = Fingerprint()
    equal = True
    for spec, tensor in group.receive([spec for spec, _ in make_tensors()], bucket_bytes, into):
        fingerprint.add(spec, tensor.contiguous().view(-1).view(torch.uint8))
        equal &= torch.equal(tensor, expected[spec.name])
        equal &= spec.name not in into or torch.equal(into[spec.name], expected[spec.name])
    pipe.send((equal, fingerprint.hexdigest()))
    if command == "receive, stay":
        pipe.recv()
    group.close()


def problem_of_endless(group: WeightGroup, bucket_bytes: int, *, fails: bool) -> str:
    """What ends the stream of `make_tensors` over and over, also with an error that this receiver raises amid it."""
    try:
        for number, _ in enumerate(group.receive([spec for spec, _ in make_tensors()] * 100_000, bucket_bytes)):
            if fails and number == 20:
                raise PublishError("the receiver failed")
    except PublishError as error:
        # While the error's frames are there, as in an engine that still has to answer.
        group.close()
        return str(error)
    raise AssertionError("the stream has ended")


if __name__ == "__main__":
    address, port, rank, world_size, bucket_bytes, timeout_s, backend = [*sys.argv[1:], "sockets"][:7]
    with Client(address, authkey=KEY) as pipe:
        receive(int(port), int(rank), int(world_size), int(bucket_bytes), float(timeout_s), backend, pipe)
