"""Which layers of a model attend to a window of the last tokens only, as transformers reads it from config.json.

For `model_shape`, and for `model_limits`, which refuses what is not held.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.shared.model_families import Family, Windows

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MAX_WINDOW_LAYERS = 28
"""Of Qwen's families, where config.json leaves it out."""

SWITCH = "use_sliding_window"


def window_of(config: Mapping[str, Any], windows: Windows | None) -> Any:
    """Number of tokens that layers with a window attend to, the token itself included; None if none has one."""
    if windows is None or (windows.switched and not config.get(SWITCH)):
        return None
    return config.get("sliding_window", windows.size)


def windowed_layers(
    config: Mapping[str, Any], traits: Family, num_layers: int, unrotated: frozenset[int]
) -> frozenset[int]:
    """The layers with a window, from 1; `unrotated` are those without rotary embeddings."""
    windows = traits.windows
    if windows is None or window_of(config, windows) is None:
        return frozenset()
    kinds = config.get("layer_types") if windows.by_layer else None
    if kinds is None:
        kinds = _kinds(config, windows, num_layers, unrotated)
    return frozenset(layer for layer, kind in enumerate(kinds, start=1) if kind == SLIDING)


def _kinds(config: Mapping[str, Any], windows: Windows, num_layers: int, unrotated: frozenset[int]) -> list[str]:
    """The kind of each layer where config.json does not list them."""
    layers = range(1, num_layers + 1)
    if windows.default == "unrotated":
        return [SLIDING if layer in unrotated else FULL for layer in layers]
    if windows.default == "last":
        first = config.get("max_window_layers", MAX_WINDOW_LAYERS)
        return [SLIDING if layer > first else FULL for layer in layers]
    period = config.get("sliding_window_pattern", windows.default) if windows.is_pattern_read else windows.default
    return [FULL if period and layer % period == 0 else SLIDING for layer in layers]


def unheld_windows(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    """What of a config's windows is not held: how it is written there, and what would be held."""
    windows, kinds = traits.windows, config.get("layer_types")
    may_slide = windows is not None and windows.by_layer
    held = [FULL, SLIDING] if may_slide else [LINEAR, FULL] if traits.delta else [FULL]
    if kinds is not None:
        listed = kinds if isinstance(kinds, list) else [kinds]
        num_layers = config.get("num_hidden_layers")
        if others := sorted(set(map(str, listed)) - set(held)):
            yield f"layer_types with {others[0]!r}", " or ".join(map(repr, held)) + " in every layer"
            return
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            either = " or ".join(map(repr, held))
            yield f"layer_types {kinds!r}", f"{either} for each of num_hidden_layers = {num_layers!r}, or none"
            return
    window = window_of(config, windows)
    if windows is None:
        if config.get(SWITCH):
            yield f"{SWITCH} true", "false"
    elif window is not None and (type(window) is not int or window < 1):
        yield f"sliding_window {window!r}", "a number from 1"
    elif window is None and may_slide:
        slides = SLIDING in kinds if isinstance(kinds, list) else not windows.switched and windows.default is not None
        if slides:
            yield f"layer_types with {SLIDING!r} and no sliding_window in use", f"{FULL!r} in every layer, or a window"
    for key, least in (("max_window_layers", 0), ("sliding_window_pattern", 1)):
        if window is not None and (type(config.get(key, least)) is not int or config.get(key, least) < least):
            yield f"{key} {config[key]!r}", f"a number from {least}"
