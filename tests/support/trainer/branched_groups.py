"""Groups of multi-turn rollouts with observed tokens and branches: random ones, and one small one of every kind."""

import random
from dataclasses import replace

from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Group, Response, RolloutFacts
from tests.support.groups import make_group, make_response

MOST_RUNS = 3
"""Turns of a response."""


def branched_group(
    index: int, rng: random.Random, *, longest: int = 5, vocab_size: int = 96, least_rollouts: int = 1
) -> Group:
    """At most four rollouts of very different numbers of branches; runs of tokens and prompts have at most `longest`.

    Every kind of response is among the random ones: of one token, with observed ranges at the start, in the middle and
    several, branches that share the prompt only, that repeat what an earlier response has sampled, or that follow
    another prompt, which several of them may share.
    """

    def tokens(least: int = 1) -> tuple[int, ...]:
        # Not 0: transformers gives the padding token's embedding no gradient.
        return tuple(rng.randrange(1, vocab_size) for _ in range(rng.randint(least, longest)))

    def grown(context: tuple[int, ...]) -> Response:
        """Turns after a context, which is observed."""
        token_ids, observed = context, [(0, len(context))] if context else []
        for turn in range(rng.randint(1, MOST_RUNS)):
            if turn:
                seen = tokens()
                observed.append((len(token_ids), len(token_ids) + len(seen)))
                token_ids += seen
            token_ids += tokens()
        return make_response(token_ids, observed=observed)

    own_prompts = [tokens(), tokens()]
    responses: list[Response] = []
    rollouts: list[RolloutFacts] = []
    for _ in range(rng.randint(least_rollouts, 4)):
        first = make_response(tokens()[:1]) if rng.random() < 0.2 else grown(() if rng.random() < 0.8 else tokens())
        own = [first]
        for _ in range(rng.choice((0, 0, 1, 5))):
            kind = rng.choice(("prompt only", "repeats", "another prompt"))
            if kind == "another prompt":
                own.append(replace(grown(()), prompt_ids=TokenIds(rng.choice(own_prompts))))
            elif kind == "repeats":
                of = rng.choice(own)
                repeated = grown((*of.token_ids[: rng.randint(1, len(of.token_ids))], *tokens(0)))
                own.append(replace(repeated, prompt_ids=of.prompt_ids))
            else:
                own.append(grown(()))
        responses += own
        rollouts.append(RolloutFacts(num_responses=len(own), num_turns=sum(turns_of(r) for r in own)))
    rewards = [rng.choice((0.0, 0.5, 1.0)) for _ in rollouts]
    return make_group(index, responses, prompt=tokens(), rollouts=rollouts, rewards=rewards)


def branched_groups(rng: random.Random) -> list[Group]:
    """Three groups: two have a gradient, the third, whose rewards are all equal, only with a KL to a reference.

    The first has every kind of response, and rollouts of one and of six of them, whatever the random ones are: more
    than 20 rows after the group's prompt, and 5 after another one.
    """
    most, equal = branched_group(0, rng), branched_group(2, rng)
    few = branched_group(1, rng, least_rollouts=2)  # Of one there would be no gradient.
    fixed = one_of_each_kind()
    many = [make_response([rng.randrange(1, 96) for _ in range(length)]) for length in (1, 5) * 3]
    most = make_group(
        0,
        [*fixed.responses, *many, *most.responses],
        prompt=fixed.prompt.token_ids,
        rollouts=[*fixed.rollouts, RolloutFacts(num_responses=6, num_turns=6), *most.rollouts],
        rewards=[*fixed.rewards, 0.5, *most.rewards],
    )
    few = replace(few, rewards=tuple(float(i % 2) for i in range(len(few.rewards))))
    return [most, few, replace(equal, rewards=(1.0,) * len(equal.rewards))]


def one_of_each_kind() -> Group:
    """Two rollouts: one of two turns and two branches, of which one repeats a part and one follows another prompt."""
    responses = [
        make_response((20, 21, 30, 31, 40), observed=[(2, 4)]),
        make_response((20, 30, 22, 23), observed=[(0, 3)]),
        make_response((60, 61, 62), observed=[(0, 1)], prompt_ids=(12, 13, 14)),
        make_response((50, 51)),
    ]
    rollouts = [RolloutFacts(num_responses=3, num_turns=4), RolloutFacts()]
    return make_group(4, responses, prompt=(10, 11), rollouts=rollouts, rewards=[1.0, 0.0])


def turns_of(response: Response) -> int:
    return sum(bool(run) for run in response.sampled_ranges)
