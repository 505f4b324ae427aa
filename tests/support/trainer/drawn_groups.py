"""Groups whose tokens a tiny model draws, so that a proof takes them."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group, Response, WeightSpan
from tests.support.groups import make_group

URL = "http://a:1"


@torch.no_grad()
def drawn_groups(
    path: Path,
    num_groups: int,
    num_responses: int,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    factor: float = 1.0,
    end: int | None = None,
    version: str = "v1",
) -> list[Group]:
    """Responses drawn at `factor` times the temperature, with the log-probs of the temperature itself; they end at the
    token `end`, if there is one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    groups = []
    for index in range(num_groups):
        prompt = (5 + index, 7, 9)
        tokens = torch.tensor([prompt] * num_responses)
        reported = []
        for _ in range(num_tokens):
            logits = model(tokens).logits[:, -1] / temperature
            drawn = (logits / factor).softmax(-1).multinomial(1)
            reported.append(logits.log_softmax(-1).gather(1, drawn))
            tokens = torch.cat([tokens, drawn], 1)
        responses = []
        for own, logprobs in zip(tokens[:, 3:].tolist(), torch.cat(reported, 1).tolist(), strict=True):
            length = own.index(end) + 1 if end in own else num_tokens
            responses.append(
                Response(
                    token_ids=TokenIds(own[:length]),
                    logprobs=Logprobs(logprobs[:length]),
                    text="",
                    finish_reason="stop" if end in own else "length",
                    weight_spans=(WeightSpan(version, 0, length),),
                    instance=URL,
                )
            )
        groups.append(make_group(index, responses, prompt=prompt, version=version))
    return groups
