"""What a notebook shows below a cell: the page of a run, and the link to its live page."""

import html
import re
import time
from pathlib import Path

from async_rl.api.command import POLL_S, Command
from async_rl.errors import WaitTimedOut
from async_rl.shared.files import write_file

START_S = 120.0
"""For a server that imports little; on a cold disk that takes long."""

HEIGHT_PX = 700


class Page:
    """An HTML page that is complete in itself, as `async-rl report` writes it."""

    def __init__(self, content: str) -> None:
        self.html = content

    def __repr__(self) -> str:
        return f"<Page of {len(self.html.encode()) / 1e6:.1f} MB: a notebook shows it; save(path) writes it>"

    def _repr_html_(self) -> str:
        # A frame of its own: its styles are not the notebook's, and it cannot reach the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" width="100%" height="{HEIGHT_PX}" '
            'style="border: 0"></iframe>'
        )

    def save(self, path: str | Path) -> Path:
        """
        Raises:
            WriteFailed: it cannot be written.
        """
        write_file(Path(path), self.html)
        return Path(path)


class DashboardLink:
    """A served page of a run: `url`, until `close` or the end of this program.

    Raises:
        AsyncRLError: the server ended.
    """

    def __init__(self, server: Command) -> None:
        self._server = server
        try:
            self.url = _address(server)
        except BaseException:
            server.end()
            raise

    def __repr__(self) -> str:
        return f"<Dashboard at {self.url}>"

    def _repr_html_(self) -> str:
        return f'<a href="{html.escape(self.url)}" target="_blank">{html.escape(self.url)}</a>'

    @property
    def is_served(self) -> bool:
        return self._server.exit_code is None

    def close(self) -> None:
        self._server.end()


def _address(server: Command) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if found := re.search(r"^dashboard: (\S+)$", server.output(), re.MULTILINE):
            return found[1]
        if (error := server.failure()) is not None:
            raise error
        server.wait(POLL_S)
    raise WaitTimedOut(f"the dashboard did not start within {START_S:g} s; see {server.log}")
