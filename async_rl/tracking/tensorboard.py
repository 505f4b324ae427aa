"""The TensorBoard file of a run, or of its evaluations; for the recorders."""

from collections.abc import Mapping
from pathlib import Path

from async_rl.files import named_write_errors


class ScalarFile:
    """Figures by step in a new event file of `directory`.

    With `first_step`, TensorBoard ignores steps from `first_step` on in the files of an interrupted run.

    Raises:
        WriteFailed: the file cannot be made; of `write` and `close`: it cannot be written.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        # Imported here: the package can be imported without torch, and only training programs write such a file.
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        with named_write_errors(directory):
            self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        with named_write_errors(self._directory):
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with named_write_errors(self._directory):
            self._writer.close()
