import json
import re
import threading
from pathlib import Path

import pytest

from async_rl.config.file import load_config
from async_rl.config.keys import kinds_of
from async_rl.config.sections import NEEDS, Config
from async_rl.errors import ConfigError
from async_rl.shared.protocol.inference import InitInfo
from tests.support.minimal_config import MINIMAL


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_config_loads_with_defaults(config_file: Path) -> None:
    config = load_config(config_file)
    assert config.train.mode == "periodic"
    assert config.algorithm.name == "grpo"
    assert config.prompts.prompts_per_batch == 4


def test_a_reward_may_be_left_out_only_where_a_program_gives_it(config_file: Path) -> None:
    config_file.write_text(MINIMAL.replace('[reward]\nname = "math"\n', ""))
    with pytest.raises(
        ConfigError, match=r"reward\.name is not set, but rollout\.program = 'single_turn' needs a reward"
    ):
        load_config(config_file)
    config_file.write_text(config_file.read_text() + '[[evaluation.sets]]\nname = "a"\nsource = "b.jsonl"\n')
    assert load_config(config_file, ["--rollout.program=python:x.py:rollout"]).reward.name is None


def test_a_batch_smaller_than_the_replicas_is_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="every replica needs at least one prompt"):
        load_config(config_file, ["--trainer.num_processes=5"])


def test_ranks_that_form_no_replicas_are_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 training ranks .* 2 x 1 x 1 = 2 ranks: start a multiple"):
        load_config(config_file, ["--trainer.num_processes=3", "--trainer.tensor_parallel=2"])
    with pytest.raises(ConfigError, match=r"expert_parallel = 2 does not divide the 1 ranks of a pipeline stage"):
        load_config(config_file, ["--trainer.expert_parallel=2"])
    assert load_config(config_file, ["--trainer.pipeline_parallel=2"]).trainer.num_local_ranks == 2


def test_several_steps_per_batch_need_an_old_model(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps_per_batch is 2 with algorithm\.old_policy = 'lagged'"):
        load_config(config_file, ["--train.steps_per_batch=2", "--algorithm.old_policy=lagged"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["--train.steps_per_batch=2", "--algorithm.old_policy=model"],
            "2 with train.steps_per_batch = 2: prompts are",
        ),
        (["--rollout.responses_per_prompt=1"], "reserve is 2 with rollout.responses_per_prompt = 1"),
        (["--algorithm.name=distillation", "--algorithm.teacher=there"], "'distillation': it avoids prompts"),
        (["--prompts.reserve=-1"], "greater than or equal to 0"),
    ],
)
def test_a_reserve_that_cannot_be_selected_from_is_refused(
    config_file: Path, settings: list[str], message: str
) -> None:
    assert load_config(config_file, ["--prompts.reserve=2"]).prompts.num_drawn == 6
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, ["--prompts.reserve=2", *settings])


def test_all_contradictions_are_named_at_once(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)train\.steps_per_batch is 2 .*\n.*max_instances is 1, but inference"):
        load_config(
            config_file, ["--train.steps_per_batch=2", "--cluster.max_instances=1", "--inference.num_instances=2"]
        )


def test_a_group_of_one_response_is_refused_since_it_trains_nothing(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"responses_per_prompt is 1, but .*'grpo' compares.*nothing is learned"):
        load_config(config_file, ["--rollout.responses_per_prompt=1"])


@pytest.mark.parametrize("setting", [{"top_p": 0.0}, {"top_p": 1.01}, {"top_p": "nan"}, {"top_k": -1}], ids=str)
def test_truncated_sampling_of_an_evaluation_set_has_bounds(config_file: Path, setting: dict[str, object]) -> None:
    ((key, value),) = setting.items()
    config_file.write_text(
        config_file.read_text() + f'[[evaluation.sets]]\nname = "a"\nsource = "b.jsonl"\n{key} = {value}\n'
    )
    with pytest.raises(ConfigError, match=rf"evaluation\.sets\.0\.{key}: Input should be"):
        load_config(config_file)


NUMBERS = {
    f"{section}.{name}": kinds_of(field.annotation)
    for section, of in Config.model_fields.items()
    for name, field in of.annotation.model_fields.items()  # type: ignore[union-attr]
    if kinds_of(field.annotation) & {int, float}
}


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.endswith("_s")])
def test_no_duration_is_longer_than_a_clock_can_wait(config_file: Path, name: str) -> None:
    """Python's own limit is nine times as much: with more, threads that wait raise an error in the middle of a run."""
    assert 1e9 < threading.TIMEOUT_MAX < 1e10
    with pytest.raises(ConfigError, match=rf"{name}: Input should be (at most 1e\+09|less than)"):
        load_config(config_file, [f"--{name}=1e10"])


@pytest.mark.parametrize("name", [name for name, kinds in NUMBERS.items() if int in kinds])
def test_no_whole_number_is_larger_than_libraries_take(config_file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: Input should be"):
        load_config(config_file, [f"--{name}={2**63}"])


def test_a_publish_takes_no_longer_than_its_protocol_allows(config_file: Path) -> None:
    limit = next(each.le for each in InitInfo.model_fields["timeout_s"].metadata if hasattr(each, "le"))
    assert load_config(config_file, [f"--publish.timeout_s={limit}"]).publish.timeout_s == limit
    with pytest.raises(ConfigError, match=rf"publish\.timeout_s: Input should be less than or equal to {limit}"):
        load_config(config_file, [f"--publish.timeout_s={limit + 1}"])


@pytest.mark.parametrize("temperature", ["0", "-1", "1e-300"])
def test_logits_are_divided_by_what_leaves_them_numbers(config_file: Path, temperature: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature: Input should be greater than or equal to 0.000001"):
        load_config(config_file, [f"--rollout.temperature={temperature}"])


@pytest.mark.parametrize(
    ("instance", "said"),
    [
        *((url, "is not a base URL of an instance") for url in ("localhost:80", "ftp://a:1", "http://a:1/x", "")),
        *((url, "is not a base URL of an instance") for url in ("http://[:]:1", "http://a:70000", "DNS:a:80")),
        *((f"dns:{name}", "is no dns:HOST:PORT, such as") for name in ("", "a", "a:", ":80", "a:x", "a:0", "a:70000")),
        *((f"dns:{name}", "is no dns:HOST:PORT, such as") for name in ("http://a:80", " a:80", "a:80/", "[:]:80")),
        ("http://b:1/", "is there twice"),
        ("dns:c.svc:1", "is there twice"),
    ],
)
def test_what_no_instance_can_be_reached_at_is_refused(config_file: Path, instance: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"pool\.instances: {re.escape(repr(instance))} {said}"):
        load_config(config_file, [f'--pool.instances=["http://b:1", "dns:c.svc:1", "{instance}"]'])


@pytest.mark.parametrize("instance", ["http://me:hidden@a:1", "dns:me:hidden@a:1"])
def test_instances_are_named_without_users_whose_passwords_are_not_shown(config_file: Path, instance: str) -> None:
    with pytest.raises(ConfigError, match=r"@a:1' is no") as caught:
        load_config(config_file, [f'--pool.instances=["{instance}"]'])
    assert "hidden" not in str(caught.value)


def test_instances_have_addresses_or_names_behind_which_they_are(config_file: Path) -> None:
    instances = ("http://a:1", "https://[::1]:2/", "dns:c.svc:1", "dns:c.svc:2", "dns:a_b.svc.:80", "dns:[::1]:80")
    config = load_config(config_file, [f"--pool.instances={json.dumps(instances)}"])
    assert config.pool.instances == instances
    assert config.pool.dns_names == ("c.svc:1", "c.svc:2", "a_b.svc.:80", "[::1]:80")


def test_a_seed_has_63_bits(config_file: Path) -> None:
    assert load_config(config_file, [f"--run.seed={2**63 - 1}"]).run.seed == 2**63 - 1


@pytest.mark.parametrize("name", ["run.dir", "publish.snapshot_dir", "prompts.source", "model.path"])
def test_texts_have_no_zero_character(config_file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: Input should have no zero character"):
        load_config(config_file, [f"--{name}=a\0b"])


def test_an_argument_of_an_engine_has_no_zero_character(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"inference\.engine_options\.0: expected a text without a zero"):
        load_config(config_file, ["--inference.engine=vllm", '--inference.engine_options=["\\u0000"]'])


TURNS = ("--run.placement=turns", "--publish.transport=snapshot", "--publish.snapshot_dir=/dev/shm/x")

WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "reward.column=which": ('--reward.parts=[{name = "math"}]',),
    "adapter.alpha=16": ("--adapter.rank=8",),
    'adapter.targets=["q_proj"]': ("--adapter.rank=8",),
    "adapter.path=saved": ("--adapter.rank=8",),
    "adapter.publish=merged": ("--adapter.rank=8",),
    "algorithm.teacher_coef=2": ("--algorithm.teacher=t",),
    "inference.tensor_parallel=2": ("--inference.engine=vllm",),
    'inference.engine_options=["--x"]': ("--inference.engine=vllm",),
}
"""Settings that differ from their defaults, and what they need."""


def test_what_needs_another_setting_is_complete() -> None:
    named = {word.partition("=")[0] for word in WITHOUT_EFFECT}
    needing = {f"{need.section}.{key}" for need in NEEDS for key in need.keys.split()}
    assert {".".join(name.split(".")[:2]) for name in named} == needing


@pytest.mark.parametrize("word", WITHOUT_EFFECT)
def test_a_setting_without_an_effect_is_refused_with_what_it_needs(config_file: Path, word: str) -> None:
    name = ".".join(word.partition("=")[0].split(".")[:2])
    alone = []
    if name.startswith("reward."):
        config_file.write_text(MINIMAL.replace('[reward]\nname = "math"\n', ""))
        alone = ["--rollout.program=python:x.py:play"]
    with pytest.raises(ConfigError, match=rf"{name} is .* and has no effect here: set .*, or remove {name}"):
        load_config(config_file, [*alone, f"--{word}"])
    load_config(config_file, [f"--{word}", *WITHOUT_EFFECT[word]])


def test_a_switch_that_is_off_keeps_its_settings(config_file: Path) -> None:
    off = (
        "--reward.timeout_s=120",
        "--algorithm.kl_coef=0",
        "--algorithm.kl_estimator=k1",
        "--rollout.options.renderer=template",
    )
    load_config(config_file, [*off, "--evaluation.every=5", "--checkpoint.keep=1", "--algorithm.importance_high=3"])
    config_file.write_text(MINIMAL.replace('[reward]\nname = "math"\n', ""))
    load_config(config_file, ["--reward.timeout_s=120", "--rollout.program=python:x.py:play"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--inference.engine=vllm"], r"inference\.engine is 'vllm', which .* set publish\.transport to 'broadcast'"),
        (["--publish.canary=always"], r"publish\.canary is 'always', which changes all .* to 'first', or publish"),
        (["--run.placement=shared"], r"publish\.transport is 'changes'.*refuse a group with two ranks on one device"),
    ],
)
def test_changes_are_sent_only_to_who_can_use_them(config_file: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, ["--publish.transport=changes", *settings])
    assert load_config(config_file, ["--publish.transport=changes"]).publish.is_broadcast


def test_stages_send_only_where_there_are_several_and_no_rank_writes_all(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.pipeline_parallel is 1, .* set publish\.transport to 'broadcast'"):
        load_config(config_file, ["--publish.transport=stages"])
    two = ["--publish.transport=stages", "--trainer.pipeline_parallel=2"]
    with pytest.raises(
        ConfigError, match=r"publish\.snapshot_dir is '/dev/shm/w', .*: leave publish\.snapshot_dir out"
    ):
        load_config(config_file, [*two, "--publish.snapshot_dir=/dev/shm/w"])
    assert load_config(config_file, two).publish.is_broadcast
    experts = ["--publish.transport=stages", "--trainer.expert_parallel=2", "--trainer.num_processes=2"]
    assert load_config(config_file, experts).trainer.num_senders == 2
    with pytest.raises(ConfigError, match=r"unless trainer\.expert_parallel is above trainer\.tensor_parallel"):
        load_config(config_file, [*experts, "--trainer.tensor_parallel=2"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"run\.placement is 'separate'.*set publish\.transport to 'broadcast', or run\.placement to 'shared'"),
        (
            ["--run.placement=turns"],
            r"run\.placement is 'turns'.*wait on the host.*set publish\.transport to 'snapshot'",
        ),
        (
            ["--run.placement=shared", "--cluster.training_nodes=2", "--trainer.num_processes=2"],
            r"cluster\.training_nodes is 2.*on its own host only: set publish\.transport to 'snapshot'",
        ),
    ],
)
def test_memory_is_mapped_only_where_pools_share_the_devices_of_one_host(
    config_file: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, ["--publish.transport=ipc", *settings])
    assert load_config(config_file, ["--publish.transport=ipc", "--run.placement=shared"]).publish.transport == "ipc"


@pytest.mark.parametrize(
    ("words", "alone"),
    [
        ((), False),
        (("--adapter.rank=4",), True),
        (("--adapter.rank=4", "--adapter.publish=merged"), False),
        (("--adapter.rank=4", "--inference.engine=vllm"), False),
        (("--adapter.rank=4", "--inference.engine=vllm", '--inference.engine_options=["--enable-lora"]'), True),
        (("--adapter.rank=4", "--inference.engine=vllm", "--adapter.publish=adapters"), True),
        (("--adapter.rank=4", *TURNS), False),
    ],
)
def test_adapters_are_published_alone_where_the_engine_can(
    config_file: Path, words: tuple[str, ...], alone: bool
) -> None:
    assert load_config(config_file, words).publishes_adapters is alone


def test_instances_that_drop_their_base_cannot_have_adapters_alone(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.placement is 'turns'.*set adapter.publish to 'merged'"):
        load_config(config_file, ["--adapter.rank=4", "--adapter.publish=adapters", *TURNS])


@pytest.mark.parametrize(
    ("rank", "words", "options"),
    [
        (4, ("--adapter.publish=adapters",), ("--enable-lora", "--max-lora-rank", "8")),
        (16, ("--adapter.publish=adapters",), ("--enable-lora", "--max-lora-rank", "16")),
        (32, ('--inference.engine_options=["--enable-lora"]',), ("--enable-lora", "--max-lora-rank", "32")),
        (
            16,
            ("--adapter.publish=adapters", '--inference.engine_options=["--max-lora-rank=64"]'),
            ("--max-lora-rank=64", "--enable-lora"),
        ),
        (16, (), ()),
    ],
)
def test_vllm_is_started_for_the_adapters_that_it_gets(
    config_file: Path, rank: int, words: tuple[str, ...], options: tuple[str, ...]
) -> None:
    config = load_config(config_file, ["--inference.engine=vllm", f"--adapter.rank={rank}", *words])
    assert config.engine_options == options


def test_an_alpha_that_leaves_nothing_of_an_adapter_is_refused(config_file: Path) -> None:
    assert load_config(config_file, ["--adapter.rank=4", "--adapter.alpha=1e-6"]).adapter.scale == 2.5e-7
    with pytest.raises(ConfigError, match=r"adapter\.alpha: Input should be greater than or equal to 0\.000001"):
        load_config(config_file, ["--adapter.rank=4", "--adapter.alpha=9e-7"])


def test_adapters_of_a_rank_that_vllm_does_not_take_are_refused(config_file: Path) -> None:
    words = ["--inference.engine=vllm", "--adapter.rank=513", "--adapter.publish=adapters"]
    with pytest.raises(ConfigError, match=r"adapter.rank is 513, and vLLM takes adapters up to rank 512"):
        load_config(config_file, words)
