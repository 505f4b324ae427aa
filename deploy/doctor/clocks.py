"""Clocks of other hosts, by the Date of an HTTP response: records, leases and logs of several hosts are compared."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime

import httpx

from async_rl.config.secrets import masked_text
from async_rl.config.sections import Config
from async_rl.shared.protocol.fleet import read_address
from async_rl.shared.protocol.routes import HEALTH
from deploy.doctor.finding import Finding, State

TIMEOUT_S = 5.0

RESOLUTION_S = 1.0
"""The header has whole seconds."""

NOTED_SKEW_S = 2.0
MAX_SKEW_S = 10.0
"""Half of the time of a lease: more, and a lease that is kept looks as if it were not."""


def servers_of(config: Config | None, named: Sequence[str]) -> list[str]:
    """URLs to ask: those given, the config's instances, and the fleet endpoint of a run that goes on in run.dir."""
    urls = [url if "://" in url else f"http://{url}" for url in named]
    if config is not None:
        urls += config.pool.urls
        with suppress(OSError, ValueError):
            urls.append(read_address(config.run.dir).url)
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def find_clock_facts(urls: Sequence[str]) -> Iterator[Finding]:
    """One finding for each server."""
    for url in urls:
        yield _clock_of(url)


def _clock_of(url: str) -> Finding:
    shown = masked_text(url)
    name = f"clock of {shown.partition('://')[2]}"
    begun_s = time.time()
    try:
        answer = httpx.get(url + HEALTH, timeout=TIMEOUT_S, trust_env=False)
        theirs_s = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Finding(name, "warning", f"{shown} does not answer: {error}", f"curl -i {shown}{HEALTH}")
    except (KeyError, ValueError):
        return Finding(name, "note", f"{shown} sends no Date by which its clock could be told")
    ended_s = time.time()
    # Their second began at most one before they answered, which was between our two times.
    earliest, latest = theirs_s - ended_s, theirs_s + RESOLUTION_S - begun_s
    skew_s = earliest if earliest > 0 else min(latest, 0.0)
    if abs(skew_s) <= NOTED_SKEW_S:
        return Finding(name, "ok", "agrees with ours, to the second")
    found = f"is at least {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} ours"
    state: State = "fault" if abs(skew_s) > MAX_SKEW_S else "warning"
    return Finding(name, state, found, "on both hosts: timedatectl set-ntp true, or chronyc makestep")
