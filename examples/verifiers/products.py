"""A taskset of verifiers whose tool multiplies; `env.toml` names this module."""

import random

import verifiers.v1 as vf

__all__ = ["ProductTaskset"]


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers."""
        return a * b


class ProductData(vf.TaskData):
    answer: int


class ProductTask(vf.Task[ProductData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)


class ProductConfig(vf.TasksetConfig):
    num_tasks: int = 1000


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self):
        numbers = random.Random(0)
        for _ in range(self.config.num_tasks):
            a, b = numbers.randrange(100), numbers.randrange(100)
            yield ProductTask(ProductData(prompt=f"What is {a} * {b}?", answer=a * b), self.config.task)

    @classmethod
    def toolsets(cls, config: ProductConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()
