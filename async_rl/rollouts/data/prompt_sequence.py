"""A sequence of prompts, for classes that know how to make one."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from async_rl.method.types import Prompt


class PromptSequence(Sequence[Prompt]):
    """Indices from the end and slices, by `prompt_at`."""

    @abstractmethod
    def prompt_at(self, index: int) -> Prompt:
        """The prompt at `index`, from 0 to the length - 1."""

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        found = range(len(self))[index]
        return self.prompt_at(found) if isinstance(found, int) else [self.prompt_at(each) for each in found]
