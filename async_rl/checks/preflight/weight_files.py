"""What a checkpoint's safetensors files hold, by their headers: names, sizes and where the bytes are; without torch."""

import hashlib
import json
from array import array
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from async_rl.checks.preflight.layer_names import names_in_layer
from async_rl.errors import ConfigError
from async_rl.shared.model_families import OUT_GATE, TABLE
from async_rl.shared.model_shape import ModelShape

HEAD, EMBEDDING, LAST_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
LAYERS = "model.layers."

OF_PREDICTORS = ("eh_proj", "enorm", "hnorm")
"""What only layers for multi-token prediction have: they read the next token's embedding beside a hidden state."""

FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
"""What follows the name of a weight in those of its scales, or of its values and their scales."""

ROTARY = "rotary_emb.inv_freq"
"""The end of the names of rotary frequencies, which old checkpoints have beside what config.json says of them."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

MAX_HEADER_BYTES = 100 * 2**20
"""The limit of the format."""

PIECE_BYTES = 2**22

FLOATS: Final = {"F64": (8, 0x7F, 0xF0), "F32": (4, 0x7F, 0x80), "F16": (2, 0x7C, 0), "BF16": (2, 0x7F, 0x80)}
"""Bytes of a value by dtype, and the bits of the exponent in the highest one and in the next one."""

PAST_FLOAT32 = 2.0**128 * (1 - 2.0**-25)
"""The least float64 that float32 rounds to infinity."""

SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: its bytes are those from `start` to `end`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def equals(self, other: "StoredTensor") -> bool:
        """Whether both are the same bit for bit."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return all(own == theirs for own, theirs in zip(self.pieces(), other.pieces(), strict=True))

    def is_finite(self) -> bool:
        """Of one of the dtypes of `FLOATS`: whether no value, read as float32, is infinite or NaN."""
        if self.dtype == "F64":
            return all(abs(value) < PAST_FLOAT32 for piece in self.pieces() for value in array("d", piece))
        # Those have exponents that are all ones.
        size, *masks = FLOATS[self.dtype]
        full = [bytes(byte & mask == mask for byte in range(256)) for mask in masks]
        return not any(
            # Of each value 1 in both numbers at its place, or not: all of them at once.
            int.from_bytes(piece[size - 1 :: size].translate(full[0]))
            & int.from_bytes(piece[size - 2 :: size].translate(full[1]))
            for piece in self.pieces()
        )

    def pieces(self) -> Iterator[bytes]:
        """Its bytes in order, at most `PIECE_BYTES` at a time."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            for left in range(self.end - self.start, 0, -PIECE_BYTES):
                yield file.read(min(left, PIECE_BYTES))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint: those of the files that its index names, or of its one file; others do not count.

    Raises:
        ConfigError: no such files, both forms of them, a damaged one, or an index of other tensors than they have; it
            begins with the name of the directory or the file.
    """
    places, named = _index_of(directory / INDEX_FILE), repr(str(directory))
    tensors: dict[str, StoredTensor] = {}
    for file in _files_of(directory, places):
        found = tensors_of(file)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ConfigError(
                f"{named} has {twice[0]!r} in {tensors[twice[0]].file.name} and in {file.name}: programs differ in "
                "which they read; download it again"
            )
        tensors |= found
    for name, place in places.items():
        if name not in tensors or tensors[name].file != directory / place:
            raise ConfigError(f"{named} has no {name!r} in {place}, where its {INDEX_FILE} has it: download it again")
    if not tensors:
        raise ConfigError(f"{named} has no tensors in its {SINGLE_FILE}: save it again (save_pretrained)")
    return tensors


def _files_of(directory: Path, places: Mapping[str, str]) -> list[Path]:
    """Those with a checkpoint's weights; `places` is its index, or empty. Raises as `stored_tensors`."""
    files = sorted({directory / place for place in places.values()}) or [directory / SINGLE_FILE]
    single, named = directory / SINGLE_FILE, repr(str(directory))
    if single.is_file() and files != [single]:
        raise ConfigError(
            f"{named} has both {SINGLE_FILE} and {INDEX_FILE}, which names other files, and programs differ in which "
            "they read: remove the one whose weights are not meant"
        )
    missing = next((file.name for file in files if not file.is_file()), None)
    if missing and places:
        raise ConfigError(f"{named} has no {missing}, which its {INDEX_FILE} names: download it again")
    if missing and (others := sorted(directory.glob("*.safetensors"))):
        raise ConfigError(
            f"{named} has {others[0].name}, but neither {SINGLE_FILE} nor {INDEX_FILE}, which says what belongs to the "
            "weights: download it again"
        )
    if missing:
        raise ConfigError(f"{named} has no *.safetensors: save its weights as safetensors (save_pretrained)")
    return files


def _index_of(file: Path) -> dict[str, str]:
    """Name of a tensor -> that of the file which has it, by an index; {} without one.

    Raises:
        ConfigError: it is damaged.
    """
    if not file.is_file():
        return {}
    try:
        places = json.loads(file.read_bytes())["weight_map"]
        if not places or not all(isinstance(place, str) for place in places.values()):
            raise ValueError("no file for each tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read as an index: expected a weight_map with the file of each tensor; download "
            "it again"
        ) from error
    return dict(places)


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Those of one file.

    Raises:
        ConfigError: it is empty, cut short, or no such file.
    """
    return _read(file)[0]


def metadata_of(file: Path) -> dict[str, str]:
    """What one file says of itself beside its tensors; raises as `tensors_of`."""
    return _read(file)[1]


def weights_sample(directory: Path) -> str:
    """BLAKE2b of names, dtypes, shapes and the first `SAMPLE_BYTES` of all tensors of a directory, in whatever files.

    Weights that were trained otherwise have another one, and it is quick: other bytes are not read. Raises as
    `stored_tensors`.
    """
    sample = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(stored_tensors(directory).items()):
        sample.update(f"{name}|{tensor.dtype}|{tensor.shape}|".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            sample.update(file.read(min(SAMPLE_BYTES, tensor.end - tensor.start)))
    return sample.hexdigest()


def is_predictor(name: str, shape: ModelShape, names: Container[str]) -> bool:
    """Whether a tensor is one of a layer for multi-token prediction, which are stored behind the model's layers, or
    apart from them beside gated delta nets; `names` are those of all tensors."""
    if shape.delta is not None and name.startswith("mtp."):
        return True
    number = name.removeprefix(LAYERS).partition(".")[0] if name.startswith(LAYERS) else ""
    if not number.isdecimal() or not shape.num_layers <= int(number) < shape.num_layers + shape.num_predictors:
        return False
    return any(f"{LAYERS}{number}.{part}.weight" in names for part in OF_PREDICTORS)


def require_sizes(named: str, shape: ModelShape, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that the files have the layers, and the embedding's [V, H], that the model's config.json says.

    Raises:
        ConfigError: they have others: layers beyond the last one would be left out.
    """
    num_layers, embedding = shape.num_layers, (shape.vocab_size, shape.hidden_size)
    numbers = [
        name.removeprefix(LAYERS).partition(".")[0]
        for name in tensors
        if name.startswith(LAYERS) and not is_predictor(name, shape, tensors)
    ]
    stored = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
    if stored and stored != num_layers:
        raise _other_sizes(named, f"num_hidden_layers = {num_layers}", f"{stored} layers")
    table = tensors.get(EMBEDDING)
    if table is not None and table.shape != embedding:
        said = f"vocab_size = {embedding[0]} and hidden_size = {embedding[1]}"
        raise _other_sizes(named, said, f"an embedding of {list(table.shape)}")


def require_names(named: str, shape: ModelShape, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that files with layers have the embedding, the last norm, and in each layer what its kind needs and what
    others of it have.

    Raises:
        ConfigError: a tensor is missing.
    """
    layers: list[set[str]] = [set() for _ in range(shape.num_layers)]
    for name in tensors:
        number, _, rest = name.removeprefix(LAYERS).partition(".")
        is_kept = name.startswith(LAYERS) and not name.endswith(ROTARY)
        if is_kept and number.isdecimal() and int(number) < shape.num_layers:
            for end in (FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES):
                rest = rest.removesuffix(end)
            layers[int(number)].add(rest)
    if not any(layers):
        return
    missing = [name for name in (EMBEDDING, LAST_NORM) if name not in tensors]
    expected: dict[tuple[bool, bool], set[str]] = {}
    kinds = [(shape.has_delta(layer), shape.has_experts(layer)) for layer in range(shape.num_layers)]
    for own, kind in zip(layers, kinds, strict=True):
        expected.setdefault(kind, set()).update(own)
    for kind, layer in dict(zip(kinds, range(shape.num_layers), strict=True)).items():
        for forms in names_in_layer(shape, layer):
            most = max(forms, key=lambda form: sum(name in own for own in layers for name in form))
            expected[kind].update(most)
    for layer, (own, kind) in enumerate(zip(layers, kinds, strict=True)):
        missing += (f"{LAYERS}{layer}.{name}" for name in sorted(expected[kind] - own))
    if missing:
        more = f" and {len(missing) - 1} others" if missing[1:] else ""
        raise ConfigError(
            f"{named} has no tensor {missing[0]!r}{more}, which its config.json asks for: download it again, or save "
            "the model whole"
        )


def require_layer_sizes(named: str, shape: ModelShape, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that the layers' matrices have the sizes that the model's config.json says, as far as they are stored.

    Raises:
        ConfigError: one has others.
    """
    for layer in range(shape.num_layers):
        for keys, sizes in _layer_sizes(shape, layer):
            for name, size in sizes.items():
                stored = tensors.get(f"{LAYERS}{layer}.{name}")
                if stored is not None and stored.shape != size:
                    said = f"{keys}, so that {name} of layer {layer}, from 0, has {list(size)},"
                    raise _other_sizes(named, said, f"{list(stored.shape)}")


def _layer_sizes(shape: ModelShape, layer: int) -> Iterator[tuple[str, Mapping[str, tuple[int, ...]]]]:
    """The sizes of matrices of a layer, from 0, and what says them."""
    H, heads = shape.hidden_size, f"num_attention_heads = {shape.num_heads}"
    if shape.delta is not None and shape.has_delta(layer):
        delta, values = shape.delta, shape.delta.num_value_heads
        K, V = delta.num_key_heads * delta.key_dim, values * delta.value_dim
        keys = f"linear_num_key_heads = {delta.num_key_heads}, linear_num_value_heads = {values}, "
        keys += f"linear_key_head_dim = {delta.key_dim}, linear_value_head_dim = {delta.value_dim}"
        made = {"qkvz": 2 * K + 2 * V, "ba": 2 * values, "qkv": 2 * K + V, "z": V, "b": values, "a": values}
        yield keys, {f"linear_attn.in_proj_{name}.weight": (size, H) for name, size in made.items()}
        conv = {"linear_attn.conv1d.weight": (2 * K + V, 1, delta.conv_width)}
        yield f"{keys}, linear_conv_kernel_dim = {delta.conv_width}", conv
        own = {"A_log": (values,), "dt_bias": (values,), "norm.weight": (delta.value_dim,), "out_proj.weight": (H, V)}
        yield keys, {f"linear_attn.{name}": size for name, size in own.items()}
    elif (sizes := shape.latents) is not None:
        up, out = shape.num_heads * (sizes.nope_dim + sizes.value_dim), shape.num_heads * sizes.value_dim
        keys = f"{heads}, kv_lora_rank = {sizes.kv_rank}, qk_nope_head_dim = {sizes.nope_dim}, "
        keys += f"qk_rope_head_dim = {sizes.rope_dim}, v_head_dim = {sizes.value_dim}"
        down = {"self_attn.kv_a_proj_with_mqa.weight": (sizes.kv_rank + sizes.rope_dim, H)}
        yield keys, down | {"self_attn.kv_b_proj.weight": (up, sizes.kv_rank), "self_attn.o_proj.weight": (H, out)}
    else:
        out, keys_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        made = {"q": out * (2 if shape.has(OUT_GATE) else 1), "k": keys_size, "v": keys_size}
        keys = f"{heads}, num_key_value_heads = {shape.num_kv_heads}, head_dim = {shape.head_dim}"
        into = {f"self_attn.{name}_proj.weight": (size, H) for name, size in made.items()}
        yield keys, into | {"self_attn.o_proj.weight": (H, out)}
    if not shape.has_experts(layer):
        yield f"intermediate_size = {shape.ffn_size}", {"mlp.down_proj.weight": (H, shape.ffn_size)}
    elif (experts := shape.experts) is not None:
        names = TABLE[shape.family].expert_names
        yield f"{experts.num_experts} experts", {f"{names.part}.gate.weight": (experts.num_experts, H)}
        one = {f"{names.part}.experts.0.{names.down}.weight": (H, experts.ffn_size)}
        yield f"experts of {experts.ffn_size}", one


def require_kinds(named: str, shape: ModelShape, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that the files have gated delta nets in the layers that the model's config.json says, and attention in the
    others; for a model with such layers.

    Raises:
        ConfigError: a layer is of the other kind.
    """
    if shape.delta is None:
        return
    for name in tensors:
        layer, _, rest = name.removeprefix(LAYERS).partition(".")
        is_linear = rest.startswith("linear_attn.")
        if not layer.isdecimal() or int(layer) >= shape.num_layers or not (is_linear or rest.startswith("self_attn.")):
            continue
        if is_linear != shape.has_delta(int(layer)):
            said, stored = ("attention", "linear attention") if is_linear else ("linear attention", "attention")
            said = f"{said} in layer {layer}, from 0, by layer_types or full_attention_interval"
            raise _other_sizes(named, said, f"{stored} there")


def _other_sizes(named: str, said: str, stored: str) -> ConfigError:
    return ConfigError(
        f"{named} has {said} in its config.json and {stored} in its safetensors files, which do not belong together: "
        "download it again"
    )


def require_tied_head(named: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that the files of a model whose head is tied to its embedding have no other head.

    Raises:
        ConfigError: they have one, which would be left out.
    """
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is not None and embedding is not None and not head.equals(embedding):
        raise ConfigError(
            f"{named} has tie_word_embeddings = true in its config.json, but a {HEAD} that is not its {EMBEDDING} and "
            "would be left out: set tie_word_embeddings to false, or remove the tensor if the embedding is meant"
        )


def _read(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file, and its metadata."""
    try:
        return _read_header(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        size = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        raise ConfigError(f"{str(file)!r} cannot be read as safetensors ({size}): download it again") from error


def _read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header: dict[str, Any] = json.loads(opened.read(size))
    metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    found = {
        name: StoredTensor(
            file, str(each["dtype"]), tuple(each["shape"]), *(8 + size + int(at) for at in each["data_offsets"])
        )
        for name, each in header.items()
    }
    needed = max((each.end for each in found.values()), default=8 + size)
    if file.stat().st_size != needed:
        raise ValueError(f"expected {needed} bytes")
    return found, metadata
