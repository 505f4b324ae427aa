"""Nodes between reward and training: each is called once for a group, with what `reads` names as keyword arguments."""

import functools
import os

import aiohttp

# A second reward model, as a service of its own.


async def style(prompt, responses):
    """A number per rollout, for other nodes and for the figures."""
    body = {"prompt": prompt.row["prompt"], "responses": [r.text for r in responses]}
    async with aiohttp.ClientSession() as session, session.post(os.environ["STYLE_URL"], json=body) as answer:
        answer.raise_for_status()
        return await answer.json()


def mixed(rewards, style):
    """Writes shaped_rewards: what advantages are made of; the figures keep the reward as `unshaped`."""
    return [reward + 0.2 * each for reward, each in zip(rewards, style, strict=True)]


# A filter, and weights of tokens.


def unsolved(rewards):
    """Writes rollout_weights: a group that is solved already counts for nothing, neither in loss nor in denominator."""
    return [0.0 if min(rewards) >= 1.0 else 1.0] * len(rewards)


def fading(responses):
    """Writes token_weights: later tokens count less."""
    return [[0.999**i for i in range(r.num_sampled)] for r in responses]


# A frozen teacher, in the worker process of its node.


@functools.cache
def teacher():
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(os.environ["TEACHER"]).eval()


def taught(prompt, responses):
    """Writes token_rewards: log-prob under the teacher less that of the policy which sampled, for each token."""
    import torch

    rewards = []
    for response in responses:
        after = list(response.prompt_ids or prompt.token_ids)
        ids = torch.tensor([after + list(response.token_ids)])
        with torch.no_grad():
            logprobs = teacher()(ids).logits[0, len(after) - 1 : -1].float().log_softmax(-1)
        of_tokens = logprobs.gather(1, ids[0, len(after) :, None])[:, 0].tolist()
        sampled = [of_tokens[i] for i in response.sampled]
        rewards.append([0.1 * (own - other) for own, other in zip(sampled, response.logprobs, strict=True)])
    return rewards
