"""What a network costs a publish and the rollouts: 1 Gbit/s and 20 ms, in turn with a network without either.

    python -m benchmarks.between_hosts --json [--repeats N] [--size tiny] [--delay-ms D] [--mbit-per-s R] [--loss L]
        [--instances N]

Needs root: trainer and instances are network namespaces (`benchmarks/common/hosts.py`), each with a link to a network
"near", which is as fast as the machine, and to a network "far". The Publisher moves a random Qwen3 in bfloat16 to one
instance, to two, and so on, each time twice as many; a producer has batches of a tiny model sampled. The last line is
one JSON object:

- `publish_s.NETWORK.N`: median seconds of a publish to N instances;
- `first_publish_s.NETWORK.N`: of the one that also forms the weight group;
- `small_publish_s.NETWORK`: median seconds of a publish of the tiny model, which is nearly all round trips;
- `changes_s.NETWORK`, `changes_bytes.NETWORK`: median seconds, and share of the bytes, of a publish to one instance
  with the transport "changes", after steps of 1e-6, as AdamW takes them at that rate;
- `of_the_rate.N`: the least time in which the far link carries the bytes once / `publish_s.far.N`;
- `rollout_s.NETWORK.LENGTH`: median seconds of a batch whose responses have that many tokens.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from async_rl.rollouts.groups.group_maker import SingleTurns

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Batch, Prompt, Publication
from async_rl.rollouts.data.prompts import Tokenizer
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.sender import WeightSender, WeightSource
from benchmarks.common.hosts import Host, Hosts, environment, why_not
from benchmarks.common.link import Link, why_no_link
from benchmarks.common.local_producer import LocalProducer as Producer
from benchmarks.common.random_model import TINY, save_random_qwen3, save_word_tokenizer, step
from benchmarks.common.running_instance import wait_for_url

NETWORKS = ("near", "far")
PORTS = {"large": 8001, "small": 8002}
NUM_SMALL = 2
"""Instances of the tiny model."""
TIMEOUT_S = 300.0
VERSION = "benchmark"

SIZES: dict[str, dict[str, int]] = {
    "full": {
        "vocab_size": 32_768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "tiny": TINY,
}

NUM_PROMPTS = 32
RESPONSES_PER_PROMPT = 8
LENGTHS = (8, 64)
PROMPT_TOKENS = 48
MAX_MODEL_LEN = 256
REWARD = "def score(prompt, responses, row):\n    return [1.0] * len(responses)\n"

Stream = list[tuple[TensorSpec, torch.Tensor]]


def make_model(path: Path, size: str) -> None:
    save_random_qwen3(path, dtype=torch.bfloat16, max_position_embeddings=MAX_MODEL_LEN, **SIZES[size])
    save_word_tokenizer(path, SIZES[size]["vocab_size"])


def stream_of(path: Path) -> Stream:
    """The weights of a checkpoint, changed slightly: what is sent must not be what is there already."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return [
        (TensorSpec(name, "bfloat16", tuple(parameter.shape)), parameter.detach() * 1.01)
        for name, parameter in model.named_parameters()
    ]


@contextmanager
def published(
    urls: Sequence[str], stream: Stream, transport: Literal["broadcast", "changes"] = "broadcast"
) -> Iterator[tuple[Callable[[], Publication], EventLoopThread, Any]]:
    """A function that publishes once, its loop and its pool."""
    source = WeightSource([spec for spec, _ in stream], lambda: iter(stream))
    config = PublishSection(timeout_s=TIMEOUT_S, transport=transport)
    with ExitStack() as closing:
        loop = EventLoopThread()
        closing.callback(loop.close)
        pool = InferencePool(PoolSection(instances=tuple(urls)))
        closing.callback(lambda: loop.run(pool.close()))
        loop.run(pool.wait_until_ready())
        sender = WeightSender(source, config, VERSION)
        closing.callback(sender.close)
        publisher = Publisher(pool, loop, config, sender, wait_s=TIMEOUT_S)

        def publish() -> Publication:
            publication = publisher.publish(VERSION)
            assert len(publication.instances) == len(urls)
            return publication

        yield publish, loop, pool


def measure_publish(urls: Sequence[str], stream: Stream, repeats: int) -> tuple[float, float]:
    """The seconds of the first publish, and the median of `repeats` further ones."""
    with published(urls, stream) as (publish, _, _):
        first = publish().seconds
        return first, statistics.median(publish().seconds for _ in range(repeats))


def measure_changes(url: str, stream: Stream, repeats: int) -> tuple[float, float]:
    """The median seconds of a publish of what a step has changed, and its share of the bytes."""
    masters = [weight.float() for _, weight in stream]
    publications = []
    with published([url], stream, "changes") as (publish, _, _):
        publish()
        for _ in range(repeats):
            step(masters, stream)
            publications.append(publish())
    seconds, num_bytes = (
        statistics.median(values)
        for values in zip(*((each.seconds, each.num_bytes) for each in publications), strict=True)
    )
    return seconds, num_bytes / sum(spec.num_bytes for spec, _ in stream)


def measure_rollouts(url: str, model: Path, stream: Stream, repeats: int) -> dict[int, float]:
    """Median seconds of a batch, by the length of its responses, after one batch that does not count."""
    reward_file = model / "reward.py"
    reward_file.write_text(REWARD)
    answer = {}
    with published([url], stream) as (publish, loop, pool):
        publish()
        for length in LENGTHS:
            reward = make_reward(RewardSection(name=f"python:{reward_file}:score"))
            rollout = RolloutSection(responses_per_prompt=RESPONSES_PER_PROMPT, max_response_tokens=length)
            tokenizer = cast(Tokenizer, AutoTokenizer.from_pretrained(model))
            producer = Producer(SingleTurns(pool, reward, tokenizer, rollout, seed=0), loop)
            try:
                seconds = [rollout_s(producer, number) for number in range(repeats + 1)]
            finally:
                producer.close()
            answer[length] = statistics.median(seconds[1:])
    return answer


def rollout_s(producer: Producer, iteration: int) -> float:
    prompts = {i: Prompt(str(i), TokenIds(range(2 + i, 2 + i + PROMPT_TOKENS)), {}) for i in range(NUM_PROMPTS)}
    begun_s = time.monotonic()
    with producer.start(Batch(iteration, prompts), VERSION) as run:
        num_left = NUM_PROMPTS
        while num_left:
            num_left -= len(run.ready(wait=True))
    return time.monotonic() - begun_s


def measure(urls: Mapping[str, Mapping[str, Sequence[str]]], models: Path, repeats: int, rate: float) -> dict[str, Any]:
    """On the trainer's host. `urls`: of the instances by network and model."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    large, small = (stream_of(models / name) for name in ("large", "small"))
    num_bytes = sum(spec.num_bytes for spec, _ in large)
    answer: dict[str, Any] = {"num_bytes": num_bytes}
    for network in NETWORKS:
        for number in numbers_up_to(len(urls[network]["large"])):
            first, further = measure_publish(urls[network]["large"][:number], large, repeats)
            answer |= {f"first_publish_s.{network}.{number}": first, f"publish_s.{network}.{number}": further}
        changes_s, share = measure_changes(urls[network]["large"][0], large, repeats)
        answer |= {f"changes_s.{network}": changes_s, f"changes_bytes.{network}": share}
        _, answer[f"small_publish_s.{network}"] = measure_publish(urls[network]["small"], small, repeats)
        for length, seconds in measure_rollouts(urls[network]["small"][0], models / "small", small, repeats).items():
            answer[f"rollout_s.{network}.{length}"] = seconds
    for number in numbers_up_to(len(urls["far"]["large"])):
        answer[f"of_the_rate.{number}"] = 8 * num_bytes / rate / answer[f"publish_s.far.{number}"]
    return {key: round(value, 4) for key, value in answer.items()}


def numbers_up_to(most: int) -> list[int]:
    """1, 2, 4 and so on."""
    return [2**i for i in range(most.bit_length())]


@contextmanager
def serving(host: Host, model: Path, port: int) -> Iterator[None]:
    """An instance on a host, ready."""
    words = [sys.executable, "-m", "inference_service", "--model", str(model), "--dtype", "bfloat16"]
    words += ["--host", "0.0.0.0", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        host.command(words), stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        try:
            wait_for_url(process)
            yield
        finally:
            process.kill()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Starts hosts and instances, and measures in a program on the trainer's host."""
    # Two links on the way, each passed there and back.
    link = Link(options.delay_ms / 1000 / 4, options.loss / 2, options.mbit_per_s * 1e6)
    instances = [f"instance-{i}" for i in range(options.instances)]
    addresses = {
        name: {"near": f"10.81.1.{i}", "far": f"10.81.2.{i}"} for i, name in enumerate(("trainer", *instances), start=1)
    }
    with tempfile.TemporaryDirectory() as directory, ExitStack() as closing:
        models = Path(directory)
        make_model(models / "large", options.size)
        make_model(models / "small", "tiny")
        hosts = Hosts(dict.fromkeys(NETWORKS, "/24"), addresses, {"far": link})
        closing.callback(hosts.close)
        for number, name in enumerate(instances):
            for model in ("large", "small") if number < NUM_SMALL else ("large",):
                closing.enter_context(serving(hosts[name], models / model, PORTS[model]))
        urls = {
            network: {
                "large": [f"http://{addresses[name][network]}:{PORTS['large']}" for name in instances],
                "small": [f"http://{addresses[name][network]}:{PORTS['small']}" for name in instances[:NUM_SMALL]],
            }
            for network in NETWORKS
        }
        words = [sys.executable, "-m", "benchmarks.between_hosts", "--measure"]
        words += [json.dumps([urls, directory, options.repeats, options.mbit_per_s * 1e6])]
        done = subprocess.run(hosts["trainer"].command(words), stdout=subprocess.PIPE, text=True, env=environment())
        assert done.returncode == 0, "the measurement failed"
        return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.between_hosts", description="Publishes and rollouts over a network."
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object, which is the only output")
    parser.add_argument("--repeats", type=int, default=5, help="publishes and batches counted (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the large model (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="there and back (default: %(default)s)")
    parser.add_argument("--mbit-per-s", type=float, default=1000.0, help="of each link (default: %(default)s)")
    parser.add_argument("--instances", type=int, default=2, help="of the large model (default: %(default)s)")
    parser.add_argument("--loss", type=float, default=0.0, help="share of frames (default: %(default)s)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        urls, models, repeats, rate = json.loads(options.measure)
        print(json.dumps(measure(urls, Path(models), repeats, rate)))
        return
    if (reason := why_not() or why_no_link()) is not None:
        sys.exit(f"this machine cannot simulate a network: {reason}")
    print(json.dumps(run(options)))


if __name__ == "__main__":
    main()
