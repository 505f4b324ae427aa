import asyncio

from async_rl.parts.sandbox import Limits, Program, open_python_tool, open_sandbox


async def main():
    sandbox = await open_sandbox()  # ConfigError where nothing isolates
    outcome = await sandbox.run(Program("print(input()[::-1])", stdin=b"abc"), Limits(wall_s=5))
    print(outcome.status, outcome.exit_code, outcome.stdout)  # ok 0 b'cba\n'

    async with open_python_tool(sandbox) as python:  # the state lasts from call to call
        await python.call("x = 20")
        print(await python.call("x * 2 + 2"))  # 42


asyncio.run(main())
