"""`python -m benchmarks.common.link_relay LINK FILE FILE`: carries frames between two TAP devices until it is killed.

LINK is a `benchmarks.common.link.Link` as JSON, each FILE the number of an open one. A direction sends one frame after
another at the link's rate, delivers each a delay later, and drops what would wait longer than a router lets it wait. A
frame may stand for several segments of TCP, which are lost or delivered together.
"""

import json
import math
import os
import random
import select
import struct
import sys
import time
from collections import deque

from benchmarks.common.link import Link

QUEUE_S = 0.05
"""How long a frame waits at most before it is sent."""

MAX_FRAME_BYTES = 2**17
FRAMES_AT_ONCE = 16
HEADER = struct.Struct("=BBHHHH")
"""virtio_net_hdr: flags, kind of segments, bytes of a segment's headers, of its content, two places of the checksum."""


class Direction:
    """From one device to the other."""

    def __init__(self, source: int, sink: int, link: Link) -> None:
        self.source = source
        self._sink = sink
        self._link = link
        self._random = random.Random(source)
        self._free_s = 0.0
        """When the last frame has been sent."""
        self._under_way: deque[tuple[float, bytes]] = deque()

    @property
    def due_s(self) -> float:
        """When the next frame arrives."""
        return self._under_way[0][0] if self._under_way else math.inf

    def take(self, now_s: float) -> None:
        """Sends what the source has."""
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(self.source, MAX_FRAME_BYTES)
            except OSError:  # It has no more, or is down.
                return
            begin_s = max(now_s, self._free_s)
            if begin_s - now_s > QUEUE_S:
                continue
            if self._link.bits_per_s is not None:
                self._free_s = begin_s + 8 * bytes_on_the_wire(frame) / self._link.bits_per_s
                begin_s = self._free_s
            if self._random.random() >= self._link.loss:
                self._under_way.append((begin_s + self._link.delay_s, frame))

    def deliver(self, now_s: float) -> None:
        while self.due_s <= now_s:
            _, frame = self._under_way.popleft()
            try:
                os.write(self._sink, frame)
            except OSError:
                # The device is down: a cut link loses frames.
                continue


def bytes_on_the_wire(frame: bytes) -> int:
    """Of all segments that a frame stands for, each with its headers."""
    _, kind, header_bytes, segment_bytes, _, _ = HEADER.unpack_from(frame)
    length = len(frame) - HEADER.size
    if kind == 0:
        return length
    num_segments = -(-(length - header_bytes) // segment_bytes)
    return int(length + (num_segments - 1) * header_bytes)


def carry(link: Link, files: tuple[int, int]) -> None:
    directions = [Direction(source, sink, link) for source, sink in (files, files[::-1])]
    while True:
        wait_s = min(direction.due_s for direction in directions) - time.monotonic()
        readable, _, _ = select.select(files, [], [], None if wait_s == math.inf else max(0.0, wait_s))
        now_s = time.monotonic()
        for direction in directions:
            if direction.source in readable:
                direction.take(now_s)
            direction.deliver(time.monotonic())


if __name__ == "__main__":
    carry(Link(**json.loads(sys.argv[1])), (int(sys.argv[2]), int(sys.argv[3])))
