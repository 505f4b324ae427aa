"""Where the trainer's fleet endpoint is, by `--register`: at a URL, or where the run's directory says at the time."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.errors import ConfigError, NoAnswer
from async_rl.protocol.fleet import ADDRESS_FILE, FleetAddress, read_address


class FleetLocation:
    """`register` is a URL or a run's directory, which need not exist yet. A directory is read anew each time, so a
    trainer that was started again on another host is found.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, register: str) -> None:
        is_path = "://" not in register and ("/" in register or Path(register).is_dir())
        self._run_dir = Path(register) if is_path else None
        url = "" if is_path else _require_url(register, f"--register {register!r}")
        self._address = FleetAddress(url=url)

    def address(self) -> FleetAddress:
        """The endpoint's address, as far as it is known now.

        Raises:
            NoAnswer: no trainer has written it to the run's directory.
        """
        if self._run_dir is None:
            return self._address
        file = self._run_dir / ADDRESS_FILE
        try:
            found = read_address(self._run_dir)
            return FleetAddress(url=_require_url(found.url, f"the url in {str(file)!r}"), run=found.run)
        except FileNotFoundError as error:
            raise NoAnswer(f"{str(file)!r} does not exist: no trainer listens") from error
        except (OSError, ValueError) as error:
            raise NoAnswer(f"{str(file)!r} does not hold the address of a fleet: {error}") from error


def _require_url(url: str, what: str) -> str:
    """
    Raises:
        ConfigError: it is none; without a slash at its end otherwise.
    """
    if not re.match(r"https?://[^\s/]+", url):
        raise ConfigError(f"{what}: expected the trainer's fleet endpoint, as http://host:port, or the run's directory")
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{what}: {error}; expected http://host:port") from error
    return url.rstrip("/")
