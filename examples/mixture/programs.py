async def rollout(prompt, policy):
    """The rollout of each part of the mixture; None is scored by `[reward]`."""
    await PROGRAMS.get(prompt.row["source"], answer)(prompt, policy)


async def answer(prompt, policy):
    await policy.generate(prompt.messages)


async def answer_and_check(prompt, policy):
    turn = await policy.generate(prompt.messages, max_tokens=512)
    check = {"role": "user", "content": "Check each step, and give the final answer again."}
    await policy.generate([*prompt.messages, turn.message, check])


PROGRAMS = {"words": answer_and_check}
