"""Settings of a first run: devices, dtype, batch, lengths and micro-batch, so that the forecast fits the machine.

Pure: the machine is an argument. A setting comes with the reason that the config's comment gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from async_rl.checks.forecast.run_forecast import RunForecast, forecast_run
from async_rl.checks.preflight.source_guess import SourceGuess
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.file import parse_config
from async_rl.config.keys import set_dotted
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.model_shape import ModelShape
from deploy.init.vllm_choice import VllmChoice
from deploy.local.machine_memory import HostMemory
from deploy.local.memory_fit import (
    GIB,
    Capacity,
    describe_need,
    device_need_bytes,
    find_misfits,
    host_bytes,
    with_adapters,
)

ROOM = 0.85
"""Of the memory there is: the forecast is within 15% of what is used."""

RATE_OF = (7e9, 1e-6)
RATE_POWER = 0.65
MIN_RATE = 1e-6
MAX_RATE = 1e-3
"""The learning rate of a model with so many parameters, and how it grows for smaller ones: near those that recipes and
quickstart learn with, 5e-6 for 0.5 billion parameters, 2e-5 for 135 million and 8e-4 for 0.4 million."""

ADAPTERS_RATE = 10
"""How many times as large that of adapters is (docs/adapters.md)."""

LEAST_ITERATIONS = 100
"""Fewer steps hardly show at such rates: a small source is passed over several times."""

MAX_HELD_OUT = 64
HELD_OUT_SHARE = 0.1
MIN_HELD_OUT = 8
"""Prompts that are not trained on but evaluated; of fewer, an interval is as wide as all that there is to learn."""

EVALUATION_SAMPLES = 2
EVALUATE_EVERY = 20
"""About as many responses as an iteration has, at every twentieth."""

MAX_RESPONSE_TOKENS = {"cpu": 256, "cuda": 2048, "npu": 2048}
PROMPTS_PER_BATCH = {"cpu": 16, "cuda": 64, "npu": 64}
MAX_ITERATIONS = 200
RESPONSES_PER_PROMPT = 8
TEMPLATE_TOKENS = 64
"""For what a chat template puts around a prompt."""

ROUND_TO = 64
MICRO_BATCHES = (16384, 8192, 4096, 2048, 1024, 512, 256)
MAX_CPU_MICRO_BATCH = 4096
"""Larger ones make no core faster, and a window takes longer."""

RECOMPUTE = ("none", "selective", "full")
MAX_TENSOR_PARALLEL = 8
MAX_CPU_INSTANCES = 4

VLLM_SHARE_OF_ONE = {"shared": 0.4, "turns": 0.8}
"""Of a device that the trainer is on, too, by placement."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known: the model, the data, the machine. `prompt_tokens` is of the longest prompt seen.

    `device_bytes` is the memory of one device.
    """

    model_path: str
    shape: ModelShape
    max_positions: int | None
    has_chat_template: bool
    source: str
    look: SourceGuess
    prompt_tokens: int
    reward: str
    device: Literal["cpu", "cuda", "npu"]
    num_devices: int
    device_bytes: int | None
    num_cores: int
    host_bytes: int
    vllm: VllmChoice


@dataclass(frozen=True, slots=True)
class Choice:
    """One key of the config; `reason` is empty where the key's own description is enough."""

    name: str
    value: Any
    reason: str = ""


def choose(seen: Seen, run_dir: str) -> list[Choice]:
    """The settings of a first run, in the order of the config's sections.

    Raises:
        ConfigError: no setting makes the run fit, the model takes no prompt of this length, or is not supported.
    """
    if seen.look.has_messages and not seen.has_chat_template:
        raise ConfigError(
            f"{seen.source!r} has chat messages, and the tokenizer in model.path {seen.model_path!r} no chat template "
            "for them: take a model with one, save one with the tokenizer, or name a column of texts with "
            "--prompt-column"
        )
    fixed = [*_fixed(seen, run_dir, seen.shape.num_parameters)]
    refused: list[tuple[list[Choice], Planned]] = []
    for found in _candidates(seen, run_dir):
        if (planned := _planned(seen, [*fixed, *found])) is None:
            continue
        if planned.fits(seen):
            return _without_defaults([*fixed, *found])
        refused.append((found, planned))
    least = min((planned for _, planned in refused), key=Planned.size, default=None)
    for found, planned in refused:
        adapted = with_adapters(planned.config, planned.forecast)
        if least and adapted and Planned(*adapted).fits(seen):
            of_all, of_adapters = describe_need(least.config, least.forecast), describe_need(*adapted)
            reason = f"all weights would need {of_all} at least, adapters need {of_adapters}"
            return _without_defaults([*map(_for_adapters, fixed), *_adapters(adapted[0].adapter, reason), *found])
    raise ConfigError(
        f"model.path {seen.model_path!r} does not fit, with adapters in place of all weights neither: "
        f"{_shortage(seen)}; take a smaller model, or a machine with more"
    )


def _candidates(seen: Seen, run_dir: str) -> Iterator[list[Choice]]:
    """Layouts and micro-batches, the fastest first."""
    for layout in _layouts(seen, run_dir):
        for recompute in RECOMPUTE:
            for micro_batch in MICRO_BATCHES:
                if seen.device != "cpu" or micro_batch <= MAX_CPU_MICRO_BATCH:
                    yield [*layout, Choice("trainer.recompute", recompute), _micro_batch(micro_batch)]


def _without_defaults(choices: list[Choice]) -> list[Choice]:
    return [each for each in choices if (each.name, each.value) != ("trainer.recompute", "none")]


def _adapters(adapter: AdapterSection, reason: str) -> Iterator[Choice]:
    yield Choice("adapter.rank", adapter.rank, reason)
    yield Choice("adapter.targets", list(adapter.targets), "all that have one" if len(adapter.targets) > 1 else "")


def _for_adapters(choice: Choice) -> Choice:
    """The same setting where adapters are trained in place of all weights."""
    if choice.name != "optimizer.learning_rate":
        return choice
    rate = float(f"{min(MAX_RATE, ADAPTERS_RATE * choice.value):.0e}")
    return replace(choice, value=rate, reason=f"of adapters, ten times that {choice.reason}")


def _micro_batch(num_tokens: int) -> Choice:
    return Choice("trainer.micro_batch_tokens", num_tokens, f"fits into {ROOM:.0%} of the memory")


def _fixed(seen: Seen, run_dir: str, num_parameters: int) -> Iterator[Choice]:
    look, device = seen.look, seen.device
    yield Choice("run.dir", run_dir)
    yield Choice("model.path", seen.model_path)
    dtype = "float32" if device == "cpu" else "bfloat16"
    yield Choice("model.dtype", dtype, "CPUs compute it fastest" if device == "cpu" else "")
    prompt, response = _lengths(seen)
    num_held_out = _num_held_out(look.num_rows)
    num_prompts = min(PROMPTS_PER_BATCH[device], look.num_rows - num_held_out)
    yield Choice("prompts.source", seen.source, look.seen)
    yield Choice("prompts.prompts_per_batch", num_prompts)
    yield Choice("prompts.max_prompt_tokens", prompt, f"the longest prompt seen has about {seen.prompt_tokens}")
    if look.columns:
        yield Choice("prompts.columns", dict(look.columns))
    yield Choice("prompts.chat_template", seen.has_chat_template, _template_reason(seen))
    if num_held_out:
        yield Choice("prompts.held_out", num_held_out, "of the rows that were looked at")
    yield Choice("rollout.responses_per_prompt", RESPONSES_PER_PROMPT)
    yield Choice("rollout.max_response_tokens", response)
    yield Choice("reward.name", seen.reward)
    yield Choice(
        "optimizer.learning_rate",
        learning_rate(num_parameters),
        f"for {num_parameters:,} parameters; three times as much if the reward stays flat, a third if it collapses",
    )
    if num_held_out:
        held_out = {"name": "held-out", "source": "held-out", "num_samples": EVALUATION_SAMPLES}
        yield Choice("evaluation.sets", [held_out])
        yield Choice("evaluation.every", EVALUATE_EVERY)
    epoch = (look.num_rows - num_held_out) // num_prompts
    iterations = min(MAX_ITERATIONS, max(LEAST_ITERATIONS, epoch))
    yield Choice("train.iterations", iterations, f"about {-(-iterations // epoch)} passes over the rows that were seen")
    yield Choice("trainer.device", device, _device_reason(seen))


def learning_rate(num_parameters: int) -> float:
    """A rate that a model of this size learns with, to one digit."""
    size, rate = RATE_OF
    return float(f"{min(MAX_RATE, max(MIN_RATE, rate * (size / num_parameters) ** RATE_POWER)):.0e}")


def _num_held_out(num_rows: int) -> int:
    """So many of the rows, or none where they are too few to tell anything."""
    num_held_out = min(MAX_HELD_OUT, int(HELD_OUT_SHARE * num_rows))
    return num_held_out if num_held_out >= MIN_HELD_OUT else 0


def _template_reason(seen: Seen) -> str:
    return "" if seen.has_chat_template else "the tokenizer has no chat template"


def _device_reason(seen: Seen) -> str:
    return f"{seen.num_devices} here" if seen.device != "cpu" else "no accelerator here"


def _lengths(seen: Seen) -> tuple[int, int]:
    """Tokens of prompt and response at most, within the model's positions.

    Raises:
        ConfigError: the longest prompt leaves no room.
    """
    template = TEMPLATE_TOKENS if seen.has_chat_template else 0
    prompt = -(-(seen.prompt_tokens + template) // ROUND_TO) * ROUND_TO
    most = prompt + MAX_RESPONSE_TOKENS[seen.device] if seen.max_positions is None else seen.max_positions
    prompt = min(prompt, most // 2)
    if prompt < 1:
        raise ConfigError(f"model.path {seen.model_path!r} has {most} positions, which leave no room for a prompt")
    return prompt, min(MAX_RESPONSE_TOKENS[seen.device], most - prompt)


def _layouts(seen: Seen, run_dir: str) -> Iterator[list[Choice]]:
    """Ranks and instances, the most instances first; on devices half of them train."""
    if seen.device == "cpu":
        most = max(1, min(MAX_CPU_INSTANCES, seen.num_cores // 2))
        for num_instances in range(most, 0, -1):
            yield [Choice("inference.num_instances", num_instances, f"for {seen.num_cores} cores")]
        return
    is_vllm = seen.vllm.found or seen.device == "npu"
    # Without one, the comment says so: the embedded engine is for small models.
    engine = Choice(
        "inference.engine", "vllm" if is_vllm else "transformers", "" if seen.vllm.found else seen.vllm.reason
    )
    python = [Choice("inference.python", seen.vllm.python, seen.vllm.reason)] if seen.vllm.python else []
    if seen.num_devices == 1:
        for placement, reason in ONE_DEVICE.items():
            yield [engine, *python, *_on_one_device(engine.value, Path(run_dir).name, placement, reason)]
        return
    ranks = seen.num_devices // 2
    tensor = 1
    while tensor <= min(ranks, MAX_TENSOR_PARALLEL):
        if ranks % tensor == 0:
            yield [
                Choice("trainer.num_processes", ranks, "half of the devices"),
                Choice("trainer.tensor_parallel", tensor),
                engine,
                *python,
                *_instances(engine.value, seen.num_devices - ranks, tensor),
            ]
        tensor *= 2


ONE_DEVICE = {
    "shared": "both pools are in the one device's memory at once, and overlap",
    "turns": "both pools take turns on the one device, which has no room for both at once",
}
"""Placements there, the faster one first."""


def _on_one_device(engine: str, run_name: str, placement: str, reason: str) -> Iterator[Choice]:
    """Both pools on the same device, and the weights between them in memory."""
    yield Choice("run.placement", placement, reason)
    yield Choice(
        "publish.transport",
        "snapshot",
        "a broadcast cannot end on the device where it begins; 'ipc' could, and has not run on hardware",
    )
    yield Choice("publish.snapshot_dir", f"/dev/shm/async-rl-{run_name}")
    if engine == "vllm":
        options = ["--gpu-memory-utilization", str(VLLM_SHARE_OF_ONE[placement])]
        yield Choice("inference.engine_options", options, "what vLLM takes of the device")


def _instances(engine: str, num_devices: int, tensor: int) -> Iterator[Choice]:
    """vLLM divides a model as the trainer has to; the embedded engine has one device."""
    ways = tensor if engine == "vllm" else 1
    yield Choice("inference.num_instances", max(1, num_devices // ways), "on the other devices")
    if ways > 1:
        yield Choice("inference.tensor_parallel", ways)


@dataclass(frozen=True, slots=True)
class Planned:
    """A config that is accepted, and its forecast."""

    config: Config
    forecast: RunForecast

    def fits(self, seen: Seen) -> bool:
        """Whether the forecast leaves room."""
        host = int(ROOM * seen.host_bytes)
        device = None if seen.device_bytes is None else int(ROOM * seen.device_bytes)
        return not find_misfits(self.config, self.forecast, Capacity(HostMemory(host, host), device)).errors

    def size(self) -> tuple[int, int]:
        """What it needs, in bytes: of a device, of the host."""
        on_device = 0 if self.config.trainer.device == "cpu" else device_need_bytes(self.config, self.forecast)
        return on_device, host_bytes(self.config, self.forecast)


def _planned(seen: Seen, choices: list[Choice]) -> Planned | None:
    # Whatever scores it: a reward may need options, which its user has to add.
    sized = [Choice("reward.name", "exact") if choice.name == "reward.name" else choice for choice in choices]
    try:
        config = parse_config(tree_of(sized), "the config that init proposes")
        return Planned(config, forecast_run(config, seen.shape))
    except ConfigError:
        # Such as fewer prompts than replicas: another layout may do.
        return None


def _shortage(seen: Seen) -> str:
    device = f", {seen.device_bytes / GIB:.0f} GiB each" if seen.device_bytes else ""
    devices = f"{seen.num_devices} devices{device}, " if seen.device != "cpu" else ""
    return f"this machine has {devices}{seen.host_bytes / GIB:.1f} GiB of memory"


def tree_of(choices: list[Choice]) -> dict[str, Any]:
    """The choices as a config of nested dicts."""
    tree: dict[str, Any] = {}
    for choice in choices:
        set_dotted(tree, choice.name, choice.value)
    return tree
