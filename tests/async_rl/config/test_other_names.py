"""Settings of other trainers: every name leads to keys that there are, and the pages about migration have all."""

import re
from typing import Any

import pytest

from async_rl.config.file import parse_config
from async_rl.config.keys import explain_unknown, keys_of, option_keys
from async_rl.config.other_names import OTHER_NAMES, TRL, VERL, OtherName, translated
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from tests.support import ROOT
from tests.support.minimal_config import minimal_tree


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_every_name_leads_to_keys_that_there_are_or_says_why_there_is_none(name: str) -> None:
    other = OTHER_NAMES[name]
    assert set(other.keys) <= keys_of(Config).keys() | option_keys(Config).keys() | {"reward.parts", "evaluation.sets"}
    assert other.keys or other.note
    for section in ("train", "algorithm", "rollout"):
        if f"{section}.{name}" not in keys_of(Config) and not any(key.endswith(f".{name}") for key in keys_of(Config)):
            said = explain_unknown(Config, (section, name))
            assert said.startswith(f"{other.trainer}'s {name} ") and f"[{section}] has " in said
            assert all(repr(key) in said for key in other.keys)


@pytest.mark.parametrize(("page", "names"), [("migration_trl.md", TRL), ("migration_verl.md", VERL)])
def test_the_page_about_migration_has_every_name(page: str, names: dict[str, OtherName]) -> None:
    rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("|")]
    for name, other in names.items():
        pattern = re.compile(rf"`(?:[\w.]+\.)?{name}(?:=[^`]*)?`")
        found = [row for row in rows if pattern.search(row.split("|")[1])]
        assert found, f"{page} has no row for {name}"
        assert all(any(f"`{key}" in row or f"[[{key}]]" in row for row in found) for key in other.keys), (name, found)
        # Nothing is said to have no counterpart where a row that begins with it names one.
        first = [row for row in found if pattern.search(row.split("|")[1]).start() <= 1]
        assert other.keys or not any(f"`{key}" in row for row in first for key in keys_of(Config)), (name, first)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"algorithm": {"beta": 0.1}}, "TRL's beta is 'algorithm.kl_coef' here; [algorithm] has "),
        ({"adapter": {"lora_rank": 8}}, "verl's lora_rank is 'adapter.rank' here"),
        (
            {"model": {"peft_config": {}}},
            "TRL's peft_config is 'adapter.rank' and 'adapter.alpha' and 'adapter.targets' here",
        ),
        ({"train": {"top_p": 0.9}}, "TRL's top_p has no counterpart: tokens would have other probabilities"),
        ({"optimizer": {"type": "muon"}}, "optimizer.type has no counterpart: it is always AdamW; why not Muon"),
        ({"train": {"on_nonfinite": "fail"}}, "train.on_nonfinite has no counterpart: what it was by default holds"),
        ({"rollout": {"max_turns": 3}}, "rollout.max_turns is 'rollout.options.max_turns' here; "),
        ({"prompts": {"template_arguments": {}}}, "prompts.template_arguments is 'prompts.chat_template' here; "),
        ({"pool": {"stream_interval": 4}}, "pool.stream_interval has no counterpart: what it was by default holds"),
        ({"rollout": {"stop_token_ids": [2]}}, "rollout.stop_token_ids is 'rollout.stop' here; "),
        ({"pool": {"fleet_port": 8600}}, "pool.fleet_port is 'pool.fleet_address' here (HOST:PORT); "),
        ({"pool": {"dns": "a:1"}}, "pool.dns is 'pool.instances' here (one of them, as dns:HOST:PORT); "),
        ({"rollout": {"options": {"max_trns": 3}}}, "did you mean 'max_turns'? rollout.options has max_turns, "),
        ({"optimiser": {"learning_rate": 1}}, "did you mean [optimizer]?"),
        ({"trian": {"iterations": 1}}, "did you mean [train]?"),
        ({"train": {"num_generations": 4}}, "TRL's num_generations is 'rollout.responses_per_prompt' here"),
    ],
)
def test_a_config_with_names_of_elsewhere_is_told_ours(tree: dict[str, Any], said: str) -> None:
    whole = minimal_tree()
    for section, values in tree.items():
        whole[section] = {**whole.get(section, {}), **values}
    with pytest.raises(ConfigError) as caught:
        parse_config(whole, "run.toml")
    assert said in str(caught.value)


def test_what_nobody_has_is_not_translated() -> None:
    assert translated("qqqq") is None
