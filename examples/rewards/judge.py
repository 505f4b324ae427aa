"""A reward that waits: a language model behind an OpenAI-compatible server judges each response.

An answer that is no number raises, and `reward.max_attempts = 3` asks again; see docs/rewards.md.
"""

import asyncio

import aiohttp

URL = "http://127.0.0.1:9000/v1/chat/completions"
MODEL = "judge"
TASK = "Question: {question}\nAnswer: {answer}\nHow good is the answer? Reply with a number from 0 to 1, nothing else."


async def judge(prompt, responses, row):
    """The judge's number for each response; all responses of the group are judged at the same time."""
    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(ask(session, row["prompt"], response.text) for response in responses))


async def ask(session, question, answer):
    message = {"role": "user", "content": TASK.format(question=question, answer=answer)}
    async with session.post(URL, json={"model": MODEL, "temperature": 0, "messages": [message]}) as reply:
        reply.raise_for_status()
        said = (await reply.json())["choices"][0]["message"]["content"]
    number = float(said)
    if not 0 <= number <= 1:
        raise ValueError(f"the judge said {said!r}: expected a number from 0 to 1; make its task clearer")
    return number
