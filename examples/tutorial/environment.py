from reward import close


async def rollout(prompt, policy):
    """Two attempts: after a wrong first one the policy is told so, and answers once more. The last turn is scored."""
    messages = list(prompt.messages)
    turn = await policy.generate(messages, max_tokens=16)
    if close(prompt, [turn], prompt.row) != [1.0]:
        messages += [turn.message, {"role": "user", "content": "That is wrong. Try again."}]
        await policy.generate(messages, max_tokens=16)
