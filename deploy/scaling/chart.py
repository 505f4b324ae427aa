"""`async-rl plan RUN --devices N -o FILE.svg`: tokens per second and device, by devices and schedule."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 320, 64, 24, 150, 44
COLOURS = ("#2563ab", "#b4541a", "#6b7280", "#3f7d3a")

Points = Sequence[tuple[int, float]]


def svg_of(lines: Mapping[str, Points]) -> str:
    """A line for each name, of (number of devices, tokens per second and device); devices on a logarithmic axis."""
    sizes = sorted({devices for points in lines.values() for devices, _ in points})
    most = max(rate for points in lines.values() for _, rate in points) or 1.0
    step = 10.0 ** math.floor(math.log10(most))
    step *= next(factor for factor in (0.2, 0.5, 1, 2) if most / (step * factor) <= 6)
    top = step * math.ceil(most / step)

    def x_of(devices: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(devices / sizes[0]) / (math.log(sizes[-1] / sizes[0]) or 1.0)

    def y_of(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / top

    parts = []
    for number in range(round(top / step) + 1):
        y = y_of(number * step)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{number * step:,.4g}", "end"))
    parts += [_text(x_of(devices), HEIGHT - BOTTOM + 16, str(devices), "middle") for devices in sizes]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "devices", "middle"))
    parts.append(_text(8, 14, "response tokens per second and device", "start"))
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_of(devices):.1f},{y_of(rate):.1f}" for devices, rate in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 16 * number
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {y}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(WIDTH - RIGHT + 36, y + 4, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
