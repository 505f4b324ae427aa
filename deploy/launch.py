"""`async-rl launch ENGINE CONFIG ...`: replaces itself by the launcher of an engine, which it does not import."""

import os
import sys
from collections.abc import Sequence

from async_rl.config.keys import nearest
from async_rl.errors import ConfigError
from async_rl.shared.programs.command_line import USAGE_ERROR
from async_rl.shared.programs.parts import PARTS, require_part

ENGINES = {
    "ray": "as actors of a Ray cluster",
    "slurm": "as Slurm jobs",
    "kubernetes": "as a release of the Helm chart",
}
"""What `async-rl launch` starts a run on; each is an optional part."""

USAGE = (
    "usage: async-rl launch ENGINE CONFIG [--dry-run] [--section.key VALUE ...]\n\n"
    "Starts the run of a config on a cluster; --dry-run prints exactly what would be submitted.\n\n"
    + "\n".join(f"  {name:<12}{description}" for name, description in ENGINES.items())
)


def main(argv: Sequence[str]) -> int:
    if not argv:
        print(USAGE, file=sys.stderr)
        return USAGE_ERROR
    engine, *arguments = argv
    if engine in ("-h", "--help"):
        print(USAGE)
        return 0
    if engine in ENGINES:
        try:
            require_part(engine)
        except ConfigError as error:
            print(f"async-rl launch: {error}", file=sys.stderr)
            return USAGE_ERROR
        os.execv(sys.executable, [sys.executable, "-m", PARTS[engine], *arguments])
    near = nearest(engine, ENGINES)
    meant = f"did you mean {near!r}? " if near else ""
    print(
        f"async-rl launch: unknown engine {engine!r}: {meant}expected one of {', '.join(ENGINES)}, before the config; "
        "async-rl run starts a run on this machine",
        file=sys.stderr,
    )
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
