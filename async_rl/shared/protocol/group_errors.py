"""What the errors of a weight group's members say, for the control side of a publish, which decides whom to leave out.

`shared/weights/` writes them, in an instance or in the trainer; `rollouts/publish/broadcast.py` reads them. What a
member says of itself is all that is believed.
"""

import re

BROKE = "the weight broadcast broke"
"""Said by a member that did its part, or was late with it: it is not the first one that failed."""

_UNREACHED = re.compile(r"no connection to rank (\d{1,9}) at ")

_STOOD_STILL = re.compile(r"it stood still for (\d+\.\d) s; ")


def stood_still(seconds: float) -> str:
    """The beginning of the error of a member that did nothing for so long: its process was stopped, or was busy."""
    return f"it stood still for {seconds:.1f} s; "


def stood_still_s(error: object) -> float:
    """For how long the member whose error this is says that it did nothing; 0 where it does not."""
    return max((float(found) for found in _STOOD_STILL.findall(str(error))), default=0.0)


def unreached(rank: int, where: str, why: object) -> str:
    """The error of a member of a chain that cannot connect to the one before it."""
    return f"no connection to rank {rank} at {where}: {why}"


def unreached_rank(error: object) -> int | None:
    """To which rank the member whose error this is cannot connect."""
    found = _UNREACHED.search(str(error))
    return None if found is None else int(found[1])
