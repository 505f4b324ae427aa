"""Random settings of `[algorithm]`: every algorithm, with what cuts across them."""

import random
from typing import Any

from async_rl.method.algorithms import ALGORITHMS

PARTS = ("format", "correct")
"""Of the rewards that `gdpo` is checked with."""

CUTTING_ACROSS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({}, {"clip_low": 0.1, "clip_high": 0.35}),
    ({}, {"normalize": "token"}, {"normalize": "sequence"}, {"normalize": "constant"}),
    ({}, {"scale_by_std": True}, {"scale_by_std": False}, {"scale_by_std": "batch"}),
    (
        {},
        *({"kl_coef": 0.2, "kl_estimator": k, "kl_in": "loss"} for k in ("k1", "k2", "k3")),
        *({"kl_coef": 0.2, "kl_estimator": k, "kl_in": "reward"} for k in ("k1", "k2", "k3")),
    ),
    ({}, {"entropy_coef": 0.02}),
    ({}, {"mask_truncated": True}),
    ({}, {"overlong_tokens": 5}),
    (
        {},
        *({"importance": f"{level}_truncate", "importance_high": 1.1} for level in ("token", "sequence")),
        *({"importance": f"{level}_mask", "importance_high": 1.3} for level in ("token", "sequence")),
    ),
    ({}, {"teacher": "teacher", "teacher_coef": 0.6}),
)
OWN: dict[str, tuple[dict[str, Any], ...]] = {
    "sapo": ({}, {"tau_positive": 0.7, "tau_negative": 1.9}),
    "dppo": ({}, {"delta": 0.05}),
    "gdpo": ({}, {"weights": {"format": 0.3, "shaping": 0.5}}),
    "pf_ppo": ({}, {"power": 3.0}),
    "online_dpo": ({}, {"beta": 0.5}),
}


def random_settings(name: str, rng: random.Random) -> dict[str, Any]:
    """Settings that the algorithm called `name` accepts."""
    settings: dict[str, Any] = {"name": name, "options": rng.choice(OWN.get(name, ({},)))}
    for choices in CUTTING_ACROSS:
        chosen = rng.choice(choices)
        if not set(chosen) & set(ALGORITHMS[name].UNUSED):
            settings |= chosen
    if name == "distillation":
        settings.setdefault("teacher", "teacher")
    waits = name == "reinforce_pp_baseline" or settings.get("scale_by_std") == "batch" or name == "gdpo"
    if waits and settings.get("kl_in") == "reward":
        settings["kl_in"] = "loss"
    return settings
