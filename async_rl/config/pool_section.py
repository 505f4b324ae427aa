"""The `[pool]` and `[publish]` sections: the instances of a run, and how weights reach them."""

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from async_rl.config.section import Section
from async_rl.config.texts import without_brackets

DNS = "dns:"
"""Before a name of `pool.instances` that is looked up, in place of a URL."""

MAX_PORT = 65535
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):(?P<port>[0-9]{1,5})")


class PoolSection(Section):
    instances: tuple[str, ...] = Field(
        (),
        description="base URLs of instances that are there from the start; and dns:HOST:PORT: every address of HOST is "
        "an instance, as they come and go",
    )
    fleet_address: str = Field(
        "127.0.0.1:0",
        description="HOST:PORT at which the fleet endpoint listens, as 0.0.0.0:8600 for all interfaces; port 0 takes a "
        "free one (see run.dir/fleet.json)",
    )
    timeout_s: float = Field(120.0, gt=0, description="how long the run waits for an instance before it fails")
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="longest time without a new token of a request or, while it waits in an instance's queue, of any "
        "request there; another instance then continues it",
    )

    @field_validator("instances")
    @classmethod
    def _are_addresses(cls, instances: tuple[str, ...]) -> tuple[str, ...]:
        for number, each in enumerate(instances):
            if each.startswith(DNS):
                if not _is_base_url(f"http://{each.removeprefix(DNS)}", needs_port=True):
                    raise ValueError(f"{each!r} is no {DNS}HOST:PORT, such as dns:inference.default.svc:8000")
            elif not _is_base_url(each.rstrip("/")):
                raise ValueError(f"{each!r} is not a base URL of an instance, expected http://host:port")
            if each.rstrip("/") in (other.rstrip("/") for other in instances[:number]):
                raise ValueError(f"{each!r} is there twice: name each instance once")
        return instances

    @field_validator("fleet_address")
    @classmethod
    def _is_host_and_port(cls, address: str) -> str:
        found = _HOST_AND_PORT.fullmatch(address)
        if found is None or int(found["port"]) > MAX_PORT:
            raise ValueError(f"{address!r} is no HOST:PORT, such as 0.0.0.0:8600 or [::]:8600")
        return address

    @property
    def fleet_host(self) -> str:
        """That of `fleet_address`, an IPv6 address without its brackets."""
        return without_brackets(self.fleet_address.rpartition(":")[0])

    @property
    def fleet_port(self) -> int:
        """That of `fleet_address`."""
        return int(self.fleet_address.rpartition(":")[2])

    def with_fleet_port(self, port: int) -> "PoolSection":
        """With the fleet endpoint at another port of the same host."""
        host, colon, _ = self.fleet_address.rpartition(":")
        return self.model_copy(update={"fleet_address": f"{host}{colon}{port}"})

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the instances that are named one by one."""
        return tuple(each for each in self.instances if not each.startswith(DNS))

    @property
    def dns_names(self) -> tuple[str, ...]:
        """HOST:PORT of each name behind which there are instances."""
        return tuple(each.removeprefix(DNS) for each in self.instances if each.startswith(DNS))


def _is_base_url(text: str, *, needs_port: bool = False) -> bool:
    """Whether it is http://HOST:PORT or https://HOST:PORT, and nothing after it."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    is_host = re.fullmatch(r"[\w.:-]+", parts.hostname or "") is not None and "@" not in parts.netloc
    is_port = not needs_port if port is None else port > 0
    return parts.scheme in ("http", "https") and is_host and is_port and text.endswith(parts.netloc)


class PublishSection(Section):
    timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="every step of a publish: rendezvous, control call, bucket"
    )
    master_address: str | None = Field(
        None, description="this trainer's own address as the instances reach it; by default the one that routes to them"
    )
    transport: Literal["broadcast", "stages", "changes", "snapshot", "ipc"] = Field(
        "broadcast",
        description="a torch.distributed broadcast, one from each pipeline stage and rank of experts, one of what has "
        "changed since the last publish, a file that the instances read, or memory of a device that both pools share "
        "(run.placement)",
    )
    snapshot_dir: Path | None = Field(
        None,
        description="where weights are written as safetensors, in shared memory or on a shared file system; a new "
        "instance then serves at once",
    )
    canary: Literal["first", "always", "off"] = Field(
        "first",
        description="show with changed weights that an engine computes with every class of tensors: before the first "
        "of its kind serves in a run, before every batch, or never, which leaves out vLLM's probe, too (see proof.md)",
    )

    @field_validator("master_address")
    @classmethod
    def _is_as_sockets_take_it(cls, address: str | None) -> str | None:
        return address and without_brackets(address)

    @property
    def is_broadcast(self) -> bool:
        """Whether a weight group between processes is formed, and anything is sent over it."""
        return self.transport in ("broadcast", "stages", "changes")

    @model_validator(mode="after")
    def _snapshots_have_a_place(self) -> "PublishSection":
        if self.transport == "snapshot" and self.snapshot_dir is None:
            raise ValueError(
                "publish.transport is 'snapshot', but publish.snapshot_dir is not set: name a directory that trainer "
                "and instances share, such as one under /dev/shm"
            )
        if self.transport == "stages" and self.snapshot_dir is not None:
            raise ValueError(
                f"publish.transport is 'stages', but publish.snapshot_dir is {str(self.snapshot_dir)!r}, and one rank "
                "writes a snapshot, through which all weights would pass: leave publish.snapshot_dir out, or set "
                "publish.transport to 'broadcast'"
            )
        return self
