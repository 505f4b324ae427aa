"""The agent of `benchmarks.chaos --rollouts agent`: a process for each rollout, which knows OpenAI's endpoint only.

Some turns, as its prompt's seed says, and a last one after a rewritten history, which is a branch. Standard library
only, and nothing of this project: there are thousands of starts in a run.
"""

import json
import os
import random
import sys
import urllib.request
from typing import Any

Message = dict[str, Any]


def main() -> None:
    prompt = json.load(sys.stdin)
    draw = random.Random(prompt["seed"])
    messages: list[Message] = prompt["messages"]
    texts: list[str] = []
    for _ in range(draw.randint(1, 5)):
        answer = _ask(messages, draw.choice([100, 8, 30]))
        texts.append(answer["content"] or "")
        messages = [*messages, answer, _said(draw)]
    if draw.random() < 0.4:
        texts.append(_ask([_said(draw), *messages[1:]], 20)["content"] or "")
    words = " ".join(texts).split()
    print(json.dumps({"reward": sum(word < "w16" for word in words) / max(len(words), 1)}))


def _ask(messages: list[Message], max_tokens: int) -> Message:
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": max_tokens}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        answer: Message = json.load(response)["choices"][0]["message"]
    return answer


def _said(draw: random.Random) -> Message:
    return {"role": "user", "content": " ".join(f"w{draw.randint(2, 95)}" for _ in range(draw.randint(1, 6)))}


if __name__ == "__main__":
    main()
