import json

from async_rl.parts.sandbox import Limits, open_python_tool, open_sandbox

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs Python; variables stay from call to call. Returns what was printed.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
opened = []  # the sandbox of this process, for all its rollouts


async def rollout(prompt, policy):
    messages = list(prompt.messages)
    if not opened:
        opened.append(await open_sandbox())
    async with open_python_tool(opened[0], Limits(wall_s=5)) as python:
        while True:
            turn = await policy.generate(messages, tools=TOOLS)
            messages.append(turn.message)
            if not turn.tool_calls:
                return float(prompt.row["answer"] in turn.text)
            for call in turn.tool_calls:
                try:
                    said = await python.call(json.loads(call["function"]["arguments"])["code"])
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    said = f"error: {error!r}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
