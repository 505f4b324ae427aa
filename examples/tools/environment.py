import json

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "The product of two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


async def rollout(prompt, policy):
    messages = list(prompt.messages)
    while True:
        turn = await policy.generate(messages, tools=TOOLS)
        messages.append(turn.message)
        if not turn.tool_calls:
            return float(prompt.row["answer"] in turn.text)
        for call in turn.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": multiply(call["function"])})


def multiply(function):
    try:
        arguments = json.loads(function["arguments"])
        return f"{float(arguments['a']) * float(arguments['b']):.12g}"
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return f"error: {error!r}"
