"""Charts of the quickstart's report as inline SVG: pure functions from numbers to markup."""

from collections.abc import Mapping, Sequence
from html import escape

BLUE, ORANGE, GREY = "#2563eb", "#d97706", "#9ca3af"
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 44, 12, 10, 34
CURVE_HEIGHT = 240
ROW_HEIGHT = 9
SMOOTHING = 0.85

Span = tuple[float, float]


def curve(values: Sequence[float], label: str, color: str, marks: Mapping[str, tuple[float, float]]) -> str:
    """A line over the iterations with values in [0, 1]: thin for measured, bold for smoothed values.

    Args:
        values: one per iteration.
        label: the name of the values; also the chart's accessible name.
        color: of the line.
        marks: labelled points (iteration, value), such as the held-out accuracy before and after.
    """
    last = max(1, len(values) - 1)

    def at(iteration: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * iteration / last
        return x, TOP + (CURVE_HEIGHT - TOP - BOTTOM) * (1.0 - value)

    parts = [_horizontal(at(0, y)[1], f"{y:.2f}") for y in (0.0, 0.25, 0.5, 0.75, 1.0)]
    ticks = sorted({round(last * share / 5) for share in range(6)})
    parts += [_text(at(x, 0)[0], CURVE_HEIGHT - BOTTOM + 14, str(x + 1), "middle") for x in ticks]
    parts.append(_text(WIDTH / 2, CURVE_HEIGHT - 4, "iteration", "middle"))
    parts.append(_polyline([at(i, value) for i, value in enumerate(values)], color, 1, 0.35))
    parts.append(_polyline([at(i, value) for i, value in enumerate(_smoothed(values))], color, 2.5, 1.0))
    for text, (iteration, value) in marks.items():
        x, y = at(iteration, value)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ORANGE}"><title>{escape(text)}</title></circle>')
        at_right = iteration > last / 2
        # Below the point, because both curves rise from there.
        parts.append(_text(x + (-9 if at_right else 9), y + 22, text, "end" if at_right else "start", ORANGE))
    return _svg(parts, CURVE_HEIGHT, label)


def timeline(rows: Sequence[tuple[str, Span, Span]], publish_s: float, seconds: float, label: str) -> str:
    """One period: a row per group with its rollout and training, over the seconds since the period's start.

    Args:
        rows: name, (start, end) of the rollout and (start, end) of the training, in the order to draw.
        publish_s: how long the publish at the start took.
        seconds: the period's length.
        label: the chart's accessible name.
    """
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    bottom = height - BOTTOM

    def x(second: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * second / seconds

    def bar(y: float, span: Span, color: str, title: str) -> str:
        width = max(1.0, x(span[1]) - x(span[0]))
        return (
            f'<rect x="{x(span[0]):.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW_HEIGHT - 2}" rx="1.5" '
            f'fill="{color}"><title>{escape(title)}: {span[0]:.3f} to {span[1]:.3f} s</title></rect>'
        )

    parts = [
        f'<rect x="{LEFT}" y="{TOP}" width="{x(publish_s) - LEFT:.1f}" height="{bottom - TOP}" fill="{GREY}" '
        f'fill-opacity="0.3"><title>publish: {publish_s:.3f} s</title></rect>'
    ]
    for i, (name, rollout, training) in enumerate(rows):
        y = TOP + ROW_HEIGHT * i
        parts.append(bar(y, rollout, BLUE, f"{name}, rollout"))
        parts.append(bar(y, training, ORANGE, f"{name}, training"))
    step = _tick_step(seconds)
    for i in range(int(seconds / step) + 1):
        parts.append(_text(x(i * step), bottom + 14, f"{i * step:.2g}", "middle"))
    parts.append(_text(WIDTH / 2, height - 4, "seconds since the period began", "middle"))
    parts.append(_text(LEFT - 6, TOP + 10, "groups", "end"))
    return _svg(parts, height, label)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average, with bias correction at its start."""
    smooth: list[float] = []
    total = weight = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smooth.append(total / weight)
    return smooth


def _tick_step(seconds: float) -> float:
    """A round step that gives four to ten ticks."""
    step = 0.001
    factors = (2.0, 2.5, 2.0)
    i = 0
    while seconds / step > 10:
        step *= factors[i % len(factors)]
        i += 1
    return step


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def _horizontal(y: float, text: str) -> str:
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>'
    return line + _text(LEFT - 6, y + 4, text, "end")


def _text(x: float, y: float, text: str, anchor: str, color: str = "#6b7280") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _polyline(points: Sequence[tuple[float, float]], color: str, width: float, opacity: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}" '
        'stroke-linejoin="round"/>'
    )
