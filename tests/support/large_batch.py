"""Synthetic data of one iteration for the records, of any size: groups, their rows of the proof, and their prompts."""

import random
import time
from dataclasses import replace

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Batch, Group, Prompt, Publication, digest_of
from tests.support.groups import make_group, make_response

NUM_TOKENS = 1500
"""Tokens per response. Groups share these objects, since a large batch would otherwise not fit in memory."""

INSTANCES = tuple(f"http://10.0.{i // 256}.{i % 256}:8000" for i in range(64))


def publication_of(version: str) -> Publication:
    return Publication(version, "0123456789abcdef", INSTANCES, 10**9, 1.0)


def make_batch(iteration: int, num_prompts: int) -> Batch:
    """Rows of a source of ten times as many, in a shuffled order, as in an epoch."""
    numbers = random.Random(iteration).sample(range(10 * num_prompts), num_prompts)
    return Batch(iteration, {i: Prompt(str(number), TokenIds((5, 6, 7)), {}) for i, number in enumerate(numbers)})


def make_groups(batch: Batch, version: str, responses_per_prompt: int) -> list[Group]:
    """The groups of a batch, in an order of completion."""
    response = make_response(range(NUM_TOKENS), "word " * NUM_TOKENS, version=version)
    started_s = time.monotonic()
    groups = [
        make_group(
            index,
            [replace(response, instance=INSTANCES[index % len(INSTANCES)])] * responses_per_prompt,
            prompt=prompt,
            version=version,
            iteration=batch.iteration,
            started_s=started_s,
            finished_s=started_s + 10.0 + index / 7,
        )
        for index, prompt in batch.prompts.items()
    ]
    random.Random(1).shuffle(groups)
    return groups


def make_row(group: Group, draw: random.Random) -> GroupProof:
    """The trainer's row of a group, with numbers that have as many digits as real ones."""
    count = group.num_response_tokens
    squares = count * draw.uniform(1e-8, 2e-8)
    gaps = LogprobGaps(
        count,
        signed_sum=draw.gauss(0, 1e-3),
        abs_sum=count * draw.uniform(5e-5, 1e-4),
        squares=squares,
        clipped_sum=draw.gauss(0, 1e-3),
        clipped_squares=squares * 0.97,
        k3_sum=squares / 2,
        largest=draw.uniform(1e-3, 2e-3),
        bins=tuple((i, count // 60) for i in range(180, 240)),
    )
    return GroupProof(
        index=group.index,
        prompt_id=group.prompt.prompt_id,
        num_responses=len(group.responses),
        num_turns=len(group.responses),
        num_prompt_tokens=len(group.prompt.token_ids),
        num_response_tokens=count,
        versions=(group.weight_version,),
        rewards=group.rewards,
        attempts=1,
        gaps=((group.responses[0].instance, gaps),),
        samples=digest_of([group.index]),
        rollout_lengths=group.rollout_lengths,
    )
