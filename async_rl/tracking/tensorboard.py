"""The TensorBoard file of a run, or of its evaluations; for the recorders."""

from collections.abc import Mapping
from pathlib import Path


class ScalarFile:
    """Figures by step in a new event file of `directory`.

    With `first_step`, TensorBoard ignores steps from `first_step` on in the files of an interrupted run.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        # Imported here: the package can be imported without torch, and only training programs write such a file.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
