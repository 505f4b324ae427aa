"""What it saves that each pipeline stage sends its own weights, where the senders' links are the slow ones.

    python -m benchmarks.stages --json [--repeats N] [--size tiny] [--stages N] [--mbit-per-s R] [--delay-ms D]

Needs root: the senders of the stages and one instance are network namespaces (`benchmarks/common/hosts.py`). Each
sender has a link of that rate and delay, the instance one that is as fast as the machine. The Publisher moves a random
Qwen3 in bfloat16, whose tensors are divided among the stages by their bytes; in turn by one sender and by all. The last
line is one JSON object:

- `one_s`, `stages_s`: median seconds of a publish by the first sender alone, and by all stages;
- `speedup`: median over the repeats of one / stages;
- `one_of_the_rate`, `stages_of_the_rate`: the least time in which the senders' links carry the bytes / these.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM

from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.sender import WeightSender, WeightSource
from async_rl.shared.weights.stages import StageInvitation, StageSender, StageSent, StageSource
from benchmarks.common.hosts import Hosts, environment, why_not
from benchmarks.common.link import Link, why_no_link
from benchmarks.common.random_model import TINY, save_random_qwen3
from benchmarks.common.running_instance import wait_for_url

TIMEOUT_S = 300.0
PORT = 8001
SIZES: dict[str, dict[str, int]] = {
    "full": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "tiny": TINY,
}

Stream = list[tuple[TensorSpec, torch.Tensor]]


def stream_of(path: Path) -> Stream:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return [
        (TensorSpec(name, "bfloat16", tuple(parameter.shape)), parameter.detach())
        for name, parameter in model.named_parameters()
    ]


def divided(stream: Stream, num_stages: int) -> list[int]:
    """The stage of each tensor: consecutive ones, of about as many bytes each."""
    total, before, stages = sum(spec.num_bytes for spec, _ in stream), 0, []
    for spec, _ in stream:
        stages.append(min(num_stages - 1, num_stages * (before + spec.num_bytes // 2) // total))
        before += spec.num_bytes
    return stages


def part(stream: Stream, stages: Sequence[int], stage: int) -> Stream:
    return [item for item, of in zip(stream, stages, strict=True) if of == stage]


def send_a_stage(path: Path, num_stages: int, stage: int, orders: Iterable[str], answers: IO[str]) -> None:
    """A further stage's sender: joins the group that a line invites it to, or sends at an empty line, and answers."""
    torch.set_num_threads(1)
    stream = stream_of(path)
    own, sender = part(stream, divided(stream, num_stages), stage), StageSender()
    print("ready", file=answers, flush=True)
    for line in orders:
        if line.strip():
            sender.join(json.loads(line))
        else:
            print(json.dumps(asdict(sender.send(own))), file=answers, flush=True)
    sender.leave()


class FurtherStages:
    """The senders of all stages but the first, as programs on hosts of their own."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        pipe = subprocess.PIPE
        self._programs = [
            subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment()) for words in commands
        ]
        for program in self._programs:
            assert program.stdout is not None and program.stdout.readline() == "ready\n", "a stage's sender failed"

    def _invite(self, invitations: Sequence[StageInvitation]) -> None:
        for program, invitation in zip(self._programs, invitations, strict=True):
            self._tell(program, json.dumps(asdict(invitation)))

    def source(self, stream: Stream, stages: Sequence[int], hosts: Sequence[str]) -> StageSource:
        first = part(stream, stages, 0)

        def send(send_own: Callable[[Any], StageSent]) -> list[StageSent]:
            for program in self._programs:
                self._tell(program, "")
            own = send_own(first)
            lines = [program.stdout.readline() for program in self._programs if program.stdout is not None]
            return [own, *(StageSent(**json.loads(line)) for line in lines)]

        return StageSource(stages, hosts, self._invite, send)

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait()

    @staticmethod
    def _tell(program: "subprocess.Popen[str]", line: str) -> None:
        assert program.stdin is not None
        program.stdin.write(line + "\n")
        program.stdin.flush()


def open_publisher(closing: ExitStack, url: str, source: WeightSource, config: PublishSection) -> Publisher:
    loop = EventLoopThread()
    closing.callback(loop.close)
    pool = InferencePool(PoolSection(instances=(url,)))
    closing.callback(lambda: loop.run(pool.close()))
    loop.run(pool.wait_until_ready())
    sender = WeightSender(source, config, "benchmark")
    closing.callback(sender.close)
    return Publisher(pool, loop, config, sender, wait_s=TIMEOUT_S)


def measure(url: str, path: Path, commands: Sequence[Sequence[str]], hosts: Sequence[str], repeats: int) -> Any:
    """On the first sender's host. Returns the bytes of all, of the largest stage, and seconds of each pair."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    stream, pairs = stream_of(path), []
    stages = divided(stream, len(hosts) + 1)
    sizes = [sum(spec.num_bytes for spec, _ in part(stream, stages, stage)) for stage in range(len(hosts) + 1)]
    with ExitStack() as closing:
        further = FurtherStages(commands)
        closing.callback(further.close)
        specs, config = [spec for spec, _ in stream], PublishSection(timeout_s=TIMEOUT_S)
        ways = [
            WeightSource(specs, lambda: iter(stream), by_stage=by_stage)
            for by_stage in (None, further.source(stream, stages, hosts))
        ]
        for number in range(repeats):
            seconds = []
            for way in ways:
                with ExitStack() as one:
                    publisher = open_publisher(one, url, way, config)
                    # The first one forms the group.
                    publisher.publish(f"{number}-first")
                    seconds.append(publisher.publish(f"{number}").seconds)
            pairs.append(seconds)
    return [sum(sizes), max(sizes), pairs]


def run(options: argparse.Namespace) -> dict[str, float]:
    link, rate = Link(options.delay_ms / 1000 / 2, 0.0, options.mbit_per_s * 1e6), options.mbit_per_s * 1e6
    senders = [f"stage-{number}" for number in range(options.stages)]
    addresses = {name: {"data": f"10.82.1.{i}"} for i, name in enumerate((*senders, "instance"), start=1)}
    with tempfile.TemporaryDirectory() as name, ExitStack() as closing:
        save_random_qwen3(Path(name), dtype=torch.bfloat16, max_position_embeddings=256, **SIZES[options.size])
        hosts = Hosts({"data": "/24"}, addresses, {(sender, "data"): link for sender in senders})
        closing.callback(hosts.close)
        words = [sys.executable, "-m", "inference_service", "--model", name, "--dtype", "bfloat16"]
        words += ["--host", "0.0.0.0", "--port", str(PORT), "--max-model-len", "256"]
        pipe = subprocess.PIPE
        command = hosts["instance"].command(words)
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment()) as process:
            closing.callback(process.kill)
            wait_for_url(process)
            ours = [sys.executable, "-m", "benchmarks.stages"]
            further = [
                hosts[sender].command([*ours, "--stage", json.dumps([name, options.stages, number])])
                for number, sender in enumerate(senders[1:], start=1)
            ]
            of_hosts = [addresses[sender]["data"] for sender in senders[1:]]
            url = f"http://{addresses['instance']['data']}:{PORT}"
            given = json.dumps([url, name, further, of_hosts, options.repeats])
            done = subprocess.run(
                hosts[senders[0]].command([*ours, "--measure", given]), stdout=pipe, text=True, env=environment()
            )
            process.kill()
        assert done.returncode == 0, "the measurement failed"
    num_bytes, largest, pairs = json.loads(done.stdout.splitlines()[-1])
    one_s, stages_s = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    answer = {
        "num_bytes": num_bytes,
        "one_s": one_s,
        "stages_s": stages_s,
        "speedup": statistics.median(one / several for one, several in pairs),
        "one_of_the_rate": 8 * num_bytes / rate / one_s,
        "stages_of_the_rate": 8 * largest / rate / stages_s,
    }
    return {key: round(value, 4) for key, value in answer.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description="Publishes by several senders.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object, which is the only output")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of publishes (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the model (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=2, help="senders (default: %(default)s)")
    parser.add_argument("--mbit-per-s", type=float, default=200.0, help="of each sender's link (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="there and back (default: %(default)s)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        path, num_stages, stage = json.loads(options.stage)
        send_a_stage(Path(path), num_stages, stage, sys.stdin, sys.stdout)
        return
    if options.measure:
        url, path, commands, hosts, repeats = json.loads(options.measure)
        print(json.dumps(measure(url, Path(path), commands, hosts, repeats)))
        return
    if (reason := why_not() or why_no_link()) is not None:
        sys.exit(f"this machine cannot simulate a network: {reason}")
    print(json.dumps(run(options)))


if __name__ == "__main__":
    main()
