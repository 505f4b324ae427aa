"""The cost of a publish compared with the bare broadcast of the same bytes, alternately, on real parts over loopback.

    python -m benchmarks.weight_sync --json [--repeats N] [--size half|tiny] [--instances 1,2,4,8]

The Publisher moves a random Qwen3 of 940 MB, in bfloat16 and the proportions of Qwen3-1.7B, to one, two and four
instances of the embedded engine. For comparison as many processes receive only the same bytes in the same buckets from
a gloo broadcast, from and into buffers that are never copied. The last line is one JSON object; the suffix `_2` means
two instances:

- `publish_s`: median seconds of a publish, from pause to the version read back;
- `bare_s`: median seconds of the bare broadcast, until every receiver has confirmed that it has all bytes;
- `gb_per_s`: bytes of the model / `publish_s`, to each instance;
- `ratio`: median over repeats of bare / publish; 1 would mean that a publish costs no more than its broadcast;
- `changes_s`, `changes_ratio`: the same of one instance with the transport "changes", after steps of 1e-6, as AdamW
  takes them at that rate; `changes_bytes`: the share of the bytes that is sent, of all where that takes less time;
- `finding_s_per_gb`, `writing_s_per_gb`: processor seconds to find what such a step changed, and to write it over what
  was there, hashes not included, for each GB of all weights; `found_bytes`: its share of them;
- `broadcast_s_per_gb`, `snapshot_s_per_gb`, `ipc_s_per_gb`: median seconds of a publish / bytes of the model, by
  `publish.transport`, alternately; snapshots are in /dev/shm.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.changes import LastSent, apply, front
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.in_flight import bytes_of
from async_rl.shared.weights.messages import BUCKET_BYTES
from async_rl.shared.weights.sender import WeightSender, WeightSource
from benchmarks.common.bare_broadcast import TIMEOUT_S, BareBroadcast
from benchmarks.common.random_model import TINY, save_random_qwen3, step
from benchmarks.common.running_instance import running_instance

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "vocab_size": 32_768,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": TINY,
}
SIZES["half"] = SIZES["full"] | {"num_hidden_layers": 4}
INSTANCE = ("--dtype", "bfloat16", "--max-model-len", "128", "--max-concurrency", "4")
NUM_INSTANCES = "1,2,4"
TRANSPORTS: tuple[Literal["broadcast", "snapshot", "ipc"], ...] = ("broadcast", "snapshot", "ipc")

Say = Callable[[str], None]
Stream = list[tuple[TensorSpec, torch.Tensor]]


def make_model(path: Path, size: str) -> Stream:
    """Saves a random Qwen3, "full" of about 940 MB in the proportions of Qwen3-1.7B, "half" of 540; its weights."""
    model = save_random_qwen3(path, dtype=torch.bfloat16, max_position_embeddings=512, **SIZES[size])
    return [
        (TensorSpec(name, "bfloat16", tuple(parameter.shape)), parameter.detach())
        for name, parameter in model.named_parameters()
    ]


def open_publisher(closing: ExitStack, urls: Sequence[str], stream: Stream, config: PublishSection) -> Publisher:
    """To the instances at `urls`, as they are now."""
    loop = EventLoopThread()
    closing.callback(loop.close)
    pool = InferencePool(PoolSection(instances=tuple(urls)))
    closing.callback(lambda: loop.run(pool.close()))
    loop.run(pool.wait_until_ready())
    sender = WeightSender(WeightSource([spec for spec, _ in stream], lambda: iter(stream)), config, "benchmark")
    closing.callback(sender.close)
    return Publisher(pool, loop, config, sender, wait_s=TIMEOUT_S)


def compare_transports(url: str, stream: Stream, repeats: int, say: Say) -> dict[str, float]:
    """Publishes to the instance at `url` by each transport in turn, each time in a group formed anew."""
    num_gb = sum(spec.num_bytes for spec, _ in stream) / 1e9
    seconds: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for number in range(repeats):
            for name in TRANSPORTS:
                with ExitStack() as closing:
                    snapshot_dir = Path(folder) if name == "snapshot" else None
                    config = PublishSection(timeout_s=TIMEOUT_S, transport=name, snapshot_dir=snapshot_dir)
                    publisher = open_publisher(closing, [url], stream, config)
                    # The first one forms the group, or writes into new memory.
                    publisher.publish(f"{name}-{number}-first")
                    seconds[name].append(publisher.publish(f"{name}-{number}").seconds / num_gb)
                say(f"{name}: {seconds[name][-1]:.3f} s per GB")
    return {f"{name}_s_per_gb": statistics.median(values) for name, values in seconds.items()}


def compare_changes(url: str, stream: Stream, repeats: int, say: Say) -> dict[str, float]:
    """Publishes what a step has changed to the instance at `url`, and bare broadcasts of all bytes, alternately."""
    num_bytes = sum(spec.num_bytes for spec, _ in stream)
    masters = [weight.float() for _, weight in stream]
    publishes, bares, shares = [], [], []
    with ExitStack() as closing:
        publisher = open_publisher(closing, [url], stream, PublishSection(timeout_s=TIMEOUT_S, transport="changes"))
        bare = BareBroadcast(1, num_bytes, BUCKET_BYTES)
        closing.callback(bare.close)
        publisher.publish("all")
        for number in range(-1, repeats):
            step(masters, stream)
            publication = publisher.publish(f"changes-{number}")
            bare_s = bare.seconds()
            share = publication.num_bytes / num_bytes
            say(f"changes, {share:.2%} of the bytes: publish {publication.seconds:.3f} s, bare {bare_s:.3f} s")
            if number >= 0:
                publishes.append(publication.seconds)
                bares.append(bare_s)
                shares.append(share)
    return {
        "changes_s": statistics.median(publishes),
        "changes_bytes": statistics.median(shares),
        "changes_ratio": statistics.median(b / p for b, p in zip(bares, publishes, strict=True)),
    }


def measure_finding(stream: Stream, repeats: int) -> dict[str, float]:
    """What changes cost both ends beside their bytes, in this process."""
    num_bytes = sum(spec.num_bytes for spec, _ in stream)
    masters = [weight.float() for _, weight in stream]
    held = {spec.name: weight.clone() for spec, weight in stream}
    last = LastSent()
    for spec, weight in stream:
        last.keep(spec, bytes_of(weight, weight.device))
    finding, writing, shares = [], [], []
    for _ in range(repeats):
        step(masters, stream)
        began_s = time.process_time()
        found = [last.replace(spec, bytes_of(weight, weight.device)) for spec, weight in stream]
        numbers, parts = zip(*(each for each in found if each is not None), strict=True)
        data = torch.cat([front(numbers, torch.device("cpu")), *(part for some in parts for part in some)])
        finding.append(time.process_time() - began_s)
        for _ in apply(data, [spec for spec, _ in stream], held):
            pass
        writing.append(time.process_time() - began_s - finding[-1])
        shares.append(len(data) / num_bytes)
    return {
        "finding_s_per_gb": statistics.median(finding) / num_bytes * 1e9,
        "writing_s_per_gb": statistics.median(writing) / num_bytes * 1e9,
        "found_bytes": statistics.median(shares),
    }


def measure(urls: Sequence[str], stream: Stream, repeats: int, say: Say) -> dict[str, float]:
    """Publishes to the instances at `urls` and broadcasts to as many bare processes, alternately."""
    num_bytes = sum(spec.num_bytes for spec, _ in stream)
    publishes, bares = [], []
    with ExitStack() as closing:
        publisher = open_publisher(closing, urls, stream, PublishSection(timeout_s=TIMEOUT_S))
        bare = BareBroadcast(len(urls), num_bytes, BUCKET_BYTES)
        closing.callback(bare.close)
        # The first one of each also forms its group and touches its memory for the first time.
        for number in range(-1, repeats):
            publication = publisher.publish(f"{len(urls)}-{number}")
            assert len(publication.instances) == len(urls)
            bare_s = bare.seconds()
            say(f"{len(urls)} x {num_bytes / 1e6:.0f} MB: publish {publication.seconds:.3f} s, bare {bare_s:.3f} s")
            if number >= 0:
                publishes.append(publication.seconds)
                bares.append(bare_s)
    publish_s = statistics.median(publishes)
    return {
        "publish_s": publish_s,
        "bare_s": statistics.median(bares),
        "gb_per_s": num_bytes / publish_s / 1e9,
        "ratio": statistics.median(b / p for b, p in zip(bares, publishes, strict=True)),
    }


def run(repeats: int, size: str, numbers: Sequence[int], say: Say) -> dict[str, float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, ExitStack() as instances:
        path = Path(name)
        stream = make_model(path, size)
        urls = [instances.enter_context(running_instance(path, *INSTANCE)) for _ in range(max(numbers))]
        answer: dict[str, float] = {}
        for number in numbers:
            suffix = "" if number == 1 else f"_{number}"
            figures = measure(urls[:number], stream, repeats, say)
            answer |= {f"{key}{suffix}": round(value, 4) for key, value in figures.items()}
        others = compare_changes(urls[0], stream, repeats, say) | measure_finding(stream, repeats)
        others |= compare_transports(urls[0], stream, repeats, say)
        return answer | {key: round(value, 4) for key, value in others.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description="A publish, and its floor.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--repeats", type=int, default=7, help="publishes counted, each way (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the model (default: %(default)s)")
    parser.add_argument("--instances", default=NUM_INSTANCES, help="numbers of them (default: %(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    say: Say = (lambda line: None) if options.json else print
    print(json.dumps(run(options.repeats, options.size, [int(each) for each in options.instances.split(",")], say)))


if __name__ == "__main__":
    main()
