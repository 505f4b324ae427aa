"""The matrix of layouts that `test_layouts.py` compares with one rank, the expected results, and a pairwise cover.

`ACCEPTED` is written by hand, independent of the rule in `async_rl/checks/preflight/layout.py` it is compared with.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from tests.support.fresh_seed import fresh_seed
from tests.support.tiny_model import FAMILIES

SPLIT_TOKENS, PACKED_TOKENS = 14, 10_000
"""`trainer.micro_batch_tokens`: less than the longest of the ragged groups, so that it is split, and more than all."""


@dataclass(frozen=True, order=True)
class Placement:
    num_ranks: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    chunks: int = 1

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor * self.context * self.pipeline

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.ranks_per_replica

    @property
    def expert_kind(self) -> str:
        """Whether a replica's ranks of a stage hold all experts."""
        if self.expert == 1:
            return "whole"
        return "within a replica" if self.tensor * self.context % self.expert == 0 else "across replicas"

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "tensor_parallel": self.tensor,
            "context_parallel": self.context,
            "pipeline_parallel": self.pipeline,
            "virtual_pipeline_parallel": self.chunks,
            "expert_parallel": self.expert,
        }

    def __str__(self) -> str:
        axes = {
            "TP": self.tensor,
            "CP": self.context,
            "PP": self.pipeline,
            "VPP": self.chunks,
            "DP": self.num_replicas,
            "EP": self.expert,
        }
        return " ".join(f"{name}{size}" for name, size in axes.items() if size > 1) or "one rank"


ACCEPTED = {
    # Ranks: (dense models, models with experts).
    1: (["one rank"], ["one rank"]),
    2: (
        ["TP2", "CP2", "PP2", "PP2 VPP2", "DP2"],
        ["TP2", "TP2 EP2", "CP2", "CP2 EP2", "PP2", "PP2 VPP2", "DP2", "DP2 EP2"],
    ),
    3: (
        ["TP3", "CP3", "PP3", "PP3 VPP2", "DP3"],
        ["TP3", "TP3 EP3", "CP3", "CP3 EP3", "PP3", "PP3 VPP2", "DP3", "DP3 EP3"],
    ),
    4: (
        [
            *("TP4", "CP4", "PP4", "PP4 VPP2", "DP4", "TP2 CP2", "TP2 PP2", "TP2 PP2 VPP2", "TP2 DP2"),
            *("CP2 PP2", "CP2 PP2 VPP2", "CP2 DP2", "PP2 DP2", "PP2 VPP2 DP2"),
        ],
        [
            *("CP4", "CP4 EP2", "CP4 EP4", "TP2 CP2", "TP2 CP2 EP2", "TP2 CP2 EP4", "CP2 PP2", "CP2 PP2 EP2"),
            *("CP2 DP2", "CP2 DP2 EP2", "CP2 DP2 EP4"),
            *("TP4", "TP4 EP2", "TP4 EP4", "PP4", "DP4", "DP4 EP2", "DP4 EP4", "PP2 DP2", "PP2 DP2 EP2"),
            *("TP2 PP2", "TP2 PP2 EP2", "TP2 DP2", "TP2 DP2 EP2", "TP2 DP2 EP4"),
            *("PP4 VPP2", "PP2 VPP2 DP2", "PP2 VPP2 DP2 EP2", "TP2 PP2 VPP2", "TP2 PP2 VPP2 EP2", "CP2 PP2 VPP2"),
            "CP2 PP2 VPP2 EP2",
        ],
    ),
}
"""Every accepted placement of that many ranks, by name, with at most two chunks a rank; all others are refused."""

LARGER = {
    # Three ranks beside two, so that expert groups and replicas overlap without either containing the other.
    6: (["TP3 DP2"], ["TP3 DP2 EP2", "TP3 DP2 EP6", "CP3 DP2 EP2"]),
    8: (
        [
            *("TP2 PP2 DP2", "TP2 PP2 VPP2 DP2", "TP2 CP2 PP2", "TP2 CP2 PP2 VPP2", "TP2 CP2 DP2"),
            *("CP2 PP2 DP2", "CP2 PP2 VPP2 DP2"),
        ],
        [
            *("TP2 PP2 DP2", "TP2 PP2 DP2 EP2", "TP2 PP2 DP2 EP4", "TP2 CP2 PP2", "TP2 CP2 PP2 EP4"),
            *("TP2 PP2 VPP2 DP2", "TP2 PP2 VPP2 DP2 EP2", "TP2 PP2 VPP2 DP2 EP4"),
            *("TP2 CP2 PP2 VPP2", "TP2 CP2 PP2 VPP2 EP4"),
            *("TP2 CP2 DP2", "TP2 CP2 DP2 EP2", "TP2 CP2 DP2 EP8", "CP2 PP2 DP2", "CP2 PP2 DP2 EP2"),
            *("CP2 PP2 DP2 EP4", "CP2 PP2 VPP2 DP2", "CP2 PP2 VPP2 DP2 EP2", "CP2 PP2 VPP2 DP2 EP4"),
        ],
    ),
    16: (
        ["TP2 CP2 PP2 DP2", "TP2 CP2 PP2 VPP2 DP2"],
        [
            *("TP2 CP2 PP2 DP2", "TP2 CP2 PP2 DP2 EP4", "TP2 CP2 PP2 DP2 EP8"),
            *("TP2 CP2 PP2 VPP2 DP2", "TP2 CP2 PP2 VPP2 DP2 EP4", "TP2 CP2 PP2 VPP2 DP2 EP8"),
        ],
    ),
}
"""Placements whose kind needs more ranks; compared under a pairwise cover of the other settings."""


DEEPSEEKS = ("deepseek_v3", "glm4_moe")
OTHER_FAMILIES = ("granite", "ministral3", "qwen3_5_text")
DELTA_NETS = ("qwen3_next", "qwen3_5")
WITH_EXPERTS = (*DEEPSEEKS, "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "minimax_m2")
"""Those with operations that the families of `cases` do not have, and of which a layout might make something else."""

OTHER_NORMS = ("olmo2", "olmo3", "gemma3_text")
"""Those with norms over what several ranks have, or of what a half of a layer adds; and with windows."""


@dataclass(frozen=True, order=True)
class Case:
    """A placement and the other settings of a case."""

    placement: Placement
    experts: bool
    tied: bool
    split: bool
    recompute: str
    reference: bool = True
    frozen_weights: str = "device"
    old_policy: str = "reuse"
    critic: bool = False
    adapters: bool = False
    dtype: str = "float32"
    family: str = ""
    ragged: bool = False
    """A model with fewer key / value heads than ranks that share heads, and layers that the stages do not divide."""

    @property
    def section(self) -> dict[str, Any]:
        return self.placement.keys | {
            "recompute": self.recompute,
            "frozen_weights": self.frozen_weights,
            "micro_batch_tokens": SPLIT_TOKENS if self.split else PACKED_TOKENS,
        }

    @property
    def model(self) -> tuple[str, bool, tuple[tuple[str, int], ...]]:
        """(family, tied, sizes) of its checkpoint."""
        return self.family or _family(self.experts, self.tied), self.tied, tuple(sorted(_sizes(self).items()))

    @property
    def kind(self) -> tuple[Any, ...]:
        """The kind of its placement, regardless of sizes."""
        place = self.placement
        axes = (place.tensor, place.context, place.pipeline, place.chunks, place.num_replicas)
        return (*(size > 1 for size in axes), place.expert_kind, self.experts)

    @property
    def factors(self) -> dict[str, Any]:
        """The factors that a pairwise cover combines."""
        place = self.placement
        axes = {
            "TP": place.tensor,
            "CP": place.context,
            "PP": place.pipeline,
            "VPP": place.chunks,
            "DP": place.num_replicas,
            "EP": place.expert_kind,
        }
        rest = {name: value for name, value in vars(self).items() if name != "placement"}
        return axes | rest

    def __str__(self) -> str:
        marks = [
            "experts" if self.experts else "dense",
            "tied" if self.tied else "untied",
            "split" if self.split else "packed",
            f"recompute {self.recompute}",
            *["no reference"] * (not self.reference),
            *[f"frozen on {self.frozen_weights}"] * (self.frozen_weights != "device"),
            *[f"old policy {self.old_policy}"] * (self.old_policy != "reuse"),
            *["critic"] * self.critic,
            *["adapters"] * self.adapters,
            *[self.dtype] * (self.dtype != "float32"),
            *[self.family] * bool(self.family),
            *["ragged"] * self.ragged,
        ]
        return ", ".join([str(self.placement), *marks])


def _family(experts: bool, tied: bool) -> str:
    if experts:
        return "qwen3_moe"
    return "qwen3" if tied else "qwen2"


def _sizes(case: Case) -> dict[str, int]:
    """The smallest model that the placement can divide; heads stay grouped."""
    place = case.placement
    thirds = 3 in (place.tensor, place.context, place.pipeline, place.expert) or 6 in (place.tensor, place.expert)
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3} if thirds else {"num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 3 if thirds else 4, "hidden_size": 48 if thirds else 32, "intermediate_size": 48}
    sizes["num_hidden_layers"] = max(2, place.pipeline * place.chunks) + case.ragged
    if case.ragged:
        sizes["num_key_value_heads"] = max(1, place.tensor * place.context // 2)
        if thirds:
            # Three ranks share the rows of one key head and of its value head.
            sizes["head_dim"] = 12
    if case.family.startswith(DELTA_NETS):
        sizes |= {"linear_num_key_heads": place.tensor, "linear_num_value_heads": 2 * place.tensor}
    if case.experts and not case.family:
        sizes["num_experts"] = max(6 if thirds else 4, place.expert)
    if case.experts and case.dtype == "bfloat16":
        # The choice of experts is discontinuous, so rounding can change it: here all experts are used.
        sizes |= {"n_group": 1, "topk_group": 1} if case.family in DEEPSEEKS else {}
        own = FAMILIES[case.family][1] if case.family else sizes
        named = next(name for name in ("n_routed_experts", "num_experts", "num_local_experts") if name in own)
        sizes["num_experts_per_tok"] = int(str(own[named]))
    return sizes


def placements(num_ranks: int) -> Iterator[Placement]:
    """Every combination of sizes up to the number of ranks, whether it is valid or not."""
    sizes = range(1, num_ranks + 1)
    for tensor, context, pipeline, expert, chunks in product(sizes, sizes, sizes, sizes, (1, 2)):
        yield Placement(num_ranks, tensor, context, pipeline, expert, chunks)


def accepted_placements(num_ranks: int, experts: bool) -> list[Placement]:
    """The placements of the hand-written lists."""
    names = set((ACCEPTED | LARGER)[num_ranks][experts])
    found = [p for p in placements(num_ranks) if str(p) in names and p.num_replicas * p.ranks_per_replica == num_ranks]
    assert {str(p) for p in found} == names and len(found) == len(names)
    return found


def cases(num_ranks: int) -> list[Case]:
    """The whole matrix of that many ranks, in float32 and with a reference."""
    return [
        Case(placement, experts, tied, split, recompute, distributed)
        for experts in (False, True)
        for placement in accepted_placements(num_ranks, experts)
        for tied, split, recompute, distributed in product(
            (True, False), (False, True), ("none", "selective", "full"), (False, True)
        )
    ]


def ragged_cases(num_ranks: int) -> list[Case]:
    """Those of dense models in which ranks share key / value heads, or stages have different numbers of layers; also of
    families whose layers have more."""
    placed = [case for case in cases(num_ranks) if not case.experts and case.placement.num_replicas < num_ranks]
    some = [replace(case, ragged=True, family=family) for case in placed for family in ("", *OTHER_FAMILIES)]
    return [case for case in some if _may_share_rows(case)]


def drawn(some: Sequence[Case], number: int) -> list[Case]:
    """So many of the cases, others in each night: the whole of them is hours of work."""
    return random.Random(fresh_seed()).sample(some, min(number, len(some)))


def cover_of_each(families: Sequence[str], num_ranks: int) -> list[Case]:
    """For each of the families, which have no experts, a cover of its own of all placements."""
    some = [case for case in cases(num_ranks) if not case.experts]
    return [
        case
        for family in families
        for case in cover_of(
            [replace(case, family=family, ragged=ragged) for case in some for ragged in (False, True)], strength=1
        )
    ]


def expert_family_cases(num_ranks: int) -> list[Case]:
    """Those of families with experts and layers of their own."""
    placed = [case for case in cases(num_ranks) if case.experts]
    some = [
        replace(case, ragged=ragged, family=family)
        for case in placed
        for family in WITH_EXPERTS
        for ragged in (False, True)
    ]
    return [case for case in some if _may_share_rows(case)]


def _may_share_rows(case: Case) -> bool:
    """A gated delta net takes its rows one after the other."""
    return case.placement.context == 1 or not case.family.startswith(DELTA_NETS)


def with_frozen_models(some: Iterable[Case]) -> list[Case]:
    """Each case with every choice of models besides the policy, and of what is trained of this."""
    choices = list(
        product((True, False), ("device", "host"), ("reuse", "model", "lagged"), (False, True), (False, True))
    )
    return [
        replace(case, reference=reference, frozen_weights=frozen, old_policy=old, critic=critic, adapters=adapters)
        for case in some
        for reference, frozen, old, critic, adapters in choices
    ]


def in_bfloat16(some: Iterable[Case]) -> list[Case]:
    """The cases with two layers: roundings add up from layer to layer, and so does their bound."""
    return [replace(case, dtype="bfloat16") for case in some if case.placement.pipeline * case.placement.chunks <= 2]


def covered(case: Case, strength: int) -> set[Any]:
    """A case's contribution to a cover: its kind of placement, and each combination of so many of its values."""
    return {case.kind, *combinations(case.factors.items(), strength)}


def cover_of(candidates: Sequence[Case], strength: int = 2) -> list[Case]:
    """A subset of the candidates with the same coverage, of pairs or of single values.

    Greedy: next is the case with the most new coverage per rank; ties are broken arbitrarily, but the same in every
    run.
    """
    shuffled = random.Random(0).sample(sorted(candidates), len(candidates))
    bits: dict[Any, int] = {}
    left = {case: sum(bits.setdefault(each, 1 << len(bits)) for each in covered(case, strength)) for case in shuffled}
    missing = sum(bits.values())
    chosen: list[Case] = []
    while missing:
        best = max(left, key=lambda case: (left[case] & missing).bit_count() / case.placement.num_ranks)
        chosen.append(best)
        missing &= ~left.pop(best)
    return chosen
