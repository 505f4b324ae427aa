"""Runs Python programs of this checkout as another user, whom this Python and this checkout may be closed to."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

NOBODY = 65534

VISIBLE = {"python": Path(sys.base_prefix), "checkout": ROOT, "packages": Path(sysconfig.get_path("purelib"))}

SCRIPT = "".join(f'mount --bind "{source}" "$0/{name}" && ' for name, source in VISIBLE.items()) + 'exec "$@"'


@dataclass(frozen=True)
class Place:
    """A directory that everybody may enter, with a virtual environment whose Python and packages are these."""

    path: Path

    def command(self, uid: int, *arguments: str) -> list[str]:
        """The command that runs the place's Python with these arguments as this user, in a mount namespace."""
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        return [*self._inside(), *become, str(self.path / "venv" / "bin" / "python"), *arguments]

    def _inside(self) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", SCRIPT, str(self.path)]

    def fill(self) -> None:
        for name in VISIBLE:
            (self.path / name).mkdir()
        python = self.path / "python" / "bin" / Path(os.path.realpath(sys.executable)).name
        venv = self.path / "venv"
        subprocess.run([*self._inside(), str(python), "-m", "venv", "--without-pip", str(venv)], check=True)
        packages = next((venv / "lib").glob("python*/site-packages"))
        (packages / "here.pth").write_text(f"{self.path / 'packages'}\n{self.path / 'checkout'}\n")


@contextmanager
def place_for_everybody() -> Iterator[Place]:
    """Needs root, who may mount."""
    path = Path(tempfile.mkdtemp(prefix="async-rl-place-"))
    try:
        path.chmod(0o755)
        place = Place(path)
        place.fill()
        yield place
    finally:
        shutil.rmtree(path)
