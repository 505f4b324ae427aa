"""How long weights take to all instances of a pool: through a chain, as here, through a tree, or one after the other.

`async-rl plan` knows what a publish to the run's own instances takes, and computes from it what further ones add.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_BYTES = 2**20
"""In which a member passes weights on to the next one."""

PIECE_S = 0.0003
"""Processor time of a member for a piece, hash included: 940 MB to four instances of one host took two cores 0.64 s
(docs/benchmarks.md)."""

DELAY_S = 0.0001
"""Of a link between hosts of one data centre."""

ONCE_S = 0.1
"""Of a publish that is not for its bytes, at most: one of 132 KB takes 13 to 80 ms on two busy cores."""

FINDING_S = 1.2e-9
"""Of a publish for each byte of all weights, to find what has changed: 1.1 to 1.4 ns with what is done with it, beside
other work (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class Member:
    """An instance, or the trainer: its link carries so much each way, at the same time."""

    bytes_per_s: float
    delay_s: float = DELAY_S
    piece_s: float = PIECE_S
    """Processor time for each piece, one after the other, before the piece is passed on."""


def chain(num_instances: int) -> list[int]:
    """Of each instance, from whom it receives: member 0 is the trainer, member i the instance i - 1."""
    return list(range(num_instances))


def tree(num_instances: int) -> list[int]:
    """As gloo's broadcast has it: whoever has a piece sends it to the members 1, 2, 4, ... places further on."""
    return [member - (1 << (member.bit_length() - 1)) for member in range(1, num_instances + 1)]


def star(num_instances: int) -> list[int]:
    return [0] * num_instances


def publish_s(sources: Sequence[int], members: Sequence[Member], num_bytes: float) -> float:
    """Seconds until all members have all bytes, which go in equal pieces of at most `PIECE_BYTES`.

    A link sends one piece at a time, to the receivers in their order, as fast as the slower of both ends takes it.
    Since all pieces are equal, those of a member arrive a fixed time apart: the longest that any part of its way takes
    for a piece.

    Args:
        sources: of each member but the first, the trainer, an earlier one that sends to it.
    """
    num_pieces = max(1, math.ceil(num_bytes / PIECE_BYTES))
    size = num_bytes / num_pieces

    def link_s(source: int, to: int) -> float:
        return size / min(members[source].bytes_per_s, members[to].bytes_per_s)

    sending_s = [0.0] * len(members)
    """What a piece takes a member's link, to all that receive it there."""
    for to, source in enumerate(sources, 1):
        sending_s[source] += link_s(source, to)
    first_s, apart_s, sent_s = ([0.0] * len(members) for _ in range(3))
    for to, source in enumerate(sources, 1):
        sent_s[source] += link_s(source, to)
        first_s[to] = first_s[source] + sent_s[source] + members[source].delay_s + members[to].piece_s
        apart_s[to] = max(apart_s[source], sending_s[source], members[to].piece_s)
    return max(first + (num_pieces - 1) * apart for first, apart in zip(first_s, apart_s, strict=True))


def passing_s(num_bytes: float, took_s: float, num_instances: int) -> float:
    """What each further instance adds to a chain's publish that took so long with `num_instances`.

    All of that time but `ONCE_S` is taken for that of the bytes: where the publish had others, it is less.
    """
    num_pieces = max(1, math.ceil(num_bytes / PIECE_BYTES))
    own_s = DELAY_S + PIECE_S
    return max(0.0, took_s - ONCE_S - num_instances * own_s) / (num_pieces + num_instances - 1) + own_s
