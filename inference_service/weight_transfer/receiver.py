"""Receiving side of a publish in one worker: join, check, receive from the weight group or a snapshot, fingerprint.

All calls block; the embedded engine runs them in its own thread. Every wait ends within the group's `timeout_s`.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from async_rl.errors import PublishError
from async_rl.shared.model_families import TABLE, ExpertNames, Family
from async_rl.shared.protocol.inference import InitInfo, UpdateInfo
from async_rl.shared.weights.fingerprint import DeviceFingerprint, Fingerprint, TensorSpec, fingerprint_on
from async_rl.shared.weights.pulse import Pulse
from async_rl.shared.weights.snapshot import read_snapshot
from async_rl.shared.weights.stages import by_turns, fingerprint_of_stages
from async_rl.shared.weights.store import join_rendezvous
from async_rl.shared.weights.stream import WeightGroup
from inference_service.engine_interface import RequestRefused


def parameter_views(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors a full update consists of, by Hugging Face checkpoint name: the model's own memory.

    A tied weight is listed under its first name only. Transformers keeps all experts of a layer in one tensor, while
    checkpoints name each expert's matrices, but for gpt-oss: these are views of it.
    """
    views: dict[str, torch.Tensor] = {}
    family = TABLE.get(getattr(getattr(model, "config", None), "model_type", ""), Family())
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        storage = weight.untyped_storage()
        # Views can be made of memory only; those of weights that sleep find it again when they wake.
        sleeps = weight.numel() and not storage.nbytes()
        if sleeps:
            storage.resize_(weight.numel() * weight.element_size())
        views |= _views_of(name, weight, family.expert_names) if family.experts != "gpt_oss" else {name: weight}
        if sleeps:
            storage.resize_(0)
    return views


def _views_of(name: str, weight: torch.Tensor, names: ExpertNames) -> dict[str, torch.Tensor]:
    layer, in_experts, what = name.replace(".mlp.", f".{names.part}.").partition(".experts.")
    if not in_experts:
        return {layer: weight}
    if what == "down_proj":
        return {f"{layer}.experts.{i}.{names.down}.weight": down for i, down in enumerate(weight)}
    views = {}
    for i, gate_up in enumerate(weight):
        for kind, part in zip((names.gate, names.up), gate_up.chunk(2), strict=True):
            views[f"{layer}.experts.{i}.{kind}.weight"] = part
    return views


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Name, dtype and shape of each tensor."""
    return {
        name: TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def announced_specs(update: UpdateInfo) -> list[TensorSpec]:
    """The tensors of an announcement, whether or not a model has them: vLLM, which fuses and renames weights, checks
    that itself.

    Raises:
        RequestRefused: the lists differ in length, a name occurs twice, or torch has no such dtype.
    """
    lengths = (len(update.names), len(update.dtype_names), len(update.shapes))
    if len(set(lengths)) != 1:
        raise RequestRefused(
            f"update_info.names, dtype_names and shapes have {lengths} entries: expected equal lengths", "update_info"
        )
    if len(set(update.names)) != len(update.names):
        twice = next(name for name in update.names if update.names.count(name) > 1)
        raise RequestRefused(f"weight {twice!r} is announced twice: send every tensor once", "update_info.names")
    for name, dtype_name in zip(update.names, update.dtype_names, strict=True):
        if not isinstance(getattr(torch, dtype_name, None), torch.dtype):
            raise RequestRefused(
                f"weight {name!r} has dtype {dtype_name!r}: expected the name of a torch dtype, such as 'bfloat16'",
                "update_info.dtype_names",
            )
    if update.stages is not None and len(update.stages) != len(update.names):
        raise RequestRefused(
            f"update_info.stages has {len(update.stages)} entries, and names {len(update.names)}: expected the stage "
            "of each tensor",
            "update_info.stages",
        )
    return [
        TensorSpec(name, dtype_name, tuple(shape))
        for name, dtype_name, shape in zip(update.names, update.dtype_names, update.shapes, strict=True)
    ]


def check_update(update: UpdateInfo, expected: Mapping[str, TensorSpec]) -> list[TensorSpec]:
    """Compares an announced stream with what the model takes, before anything is received.

    Raises:
        RequestRefused: the announcement contradicts itself, a name is unknown, or a dtype or shape differs.
    """
    specs = announced_specs(update)
    for spec in specs:
        want = expected.get(spec.name)
        if want is None:
            advice = _advice(spec.name, expected)
            raise RequestRefused(f"the model has no weight {spec.name!r}: {advice}", "update_info.names")
        if spec.dtype_name != want.dtype_name:
            raise RequestRefused(
                f"weight {spec.name!r} has dtype {spec.dtype_name!r}, the model expects {want.dtype_name!r}: "
                "convert it before sending, or start the instance with that --dtype",
                "update_info.dtype_names",
            )
        if spec.shape != want.shape:
            raise RequestRefused(
                f"weight {spec.name!r} has shape {list(spec.shape)}, the model expects {list(want.shape)}: "
                "both sides must be made from the same checkpoint",
                "update_info.shapes",
            )
    return specs


def _advice(name: str, expected: Mapping[str, TensorSpec]) -> str:
    if name == "lm_head.weight":
        return "its output head is tied to the embedding; leave lm_head.weight out"
    known = sorted(expected)
    return f"expected Hugging Face checkpoint names such as {known[0]!r}, {known[-1]!r}"


class WeightReceiver:
    """This worker's membership in a trainer's weight group, the streams it receives, and the last one's fingerprint."""

    def __init__(self) -> None:
        self._groups: list[WeightGroup] = []
        """That of each pipeline stage that sends; one, where the main rank sends all."""
        self._info: InitInfo | None = None
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str | None:
        return self._fingerprint

    def join(self, info: InitInfo) -> None:
        """Leaves the present group and joins the one `info` names; returns when all its members have joined.

        Raises:
            PublishError: the rendezvous did not complete within `info.timeout_s`.
        """
        self.leave()
        if info.rank_offset >= info.world_size:
            raise RequestRefused(
                f"rank_offset {info.rank_offset} must be below world_size {info.world_size}: "
                "the trainer is rank 0 and every worker one more",
                "init_info.rank_offset",
            )
        pulse = Pulse(info.timeout_s)
        try:
            for port in (info.master_port, *info.stage_ports):
                store = join_rendezvous(info.master_address, port, info.secret, info.timeout_s)
                its = info.rank_offset, info.world_size, info.backend, info.timeout_s
                self._groups.append(WeightGroup(store, *its, pulse=pulse))
        except PublishError:
            self.leave()
            raise
        self._info = info

    def stream(
        self,
        update: UpdateInfo,
        specs: Sequence[TensorSpec],
        into: Mapping[str, torch.Tensor] | None = None,
        holds: str | None = None,
    ) -> Generator[tuple[TensorSpec, torch.Tensor], None, None]:
        """Yields (spec, tensor) of one stream in its order, from the weight group or from `update.snapshot`.

        A tensor whose name is in `into` is received into that tensor, which has its dtype and shape; any other tensor
        stays valid while it is referenced, together with the message that contains it. After the last tensor,
        `fingerprint` is that of this stream. The sender is notified in the first step that the stream is accepted; a
        caller that stops early must close the iterator, which leaves the group.

        Args:
            holds: fingerprint of what `into` has, in a destination for each tensor: the sender may then send what has
                changed since.

        Raises:
            RequestRefused: the snapshot is missing, damaged or has other tensors; nothing was changed.
            PublishError: no group was joined, or the transfer failed; the group is then left, and a new one must be
                joined.
        """
        stage_of = dict.fromkeys(update.names, 0)
        if update.stages is not None and update.snapshot is None:
            stage_of = dict(zip(update.names, update.stages, strict=True))
        num_stages = max(stage_of.values()) + 1
        if num_stages > max(len(self._groups), 1):
            raise RequestRefused(
                f"update_info.stages has {num_stages - 1}, but {len(self._groups)} weight groups were joined: expected "
                "numbers below that",
                "update_info.stages",
            )
        if update.snapshot is not None:
            yield from self._from_snapshot(Path(update.snapshot), specs, into or {})
            return
        parts: list[list[TensorSpec]] = [[] for _ in range(num_stages)]
        for spec in specs:
            parts[stage_of[spec.name]].append(spec)
        yield from self._from_groups(parts, into or {}, holds)

    def fingerprint_for(self, update: UpdateInfo) -> Fingerprint | DeviceFingerprint:
        """As the sender of this stream computes it."""
        return Fingerprint() if update.snapshot or not self._groups else fingerprint_on(self._groups[0].device)

    def _from_groups(
        self, parts: Sequence[Sequence[TensorSpec]], into: Mapping[str, torch.Tensor], holds: str | None
    ) -> Generator[tuple[TensorSpec, torch.Tensor], None, None]:
        """Receives each part from the group of its stage."""
        if not self._groups or self._info is None:
            raise PublishError("no weight group: call /init_weight_transfer_engine before /update_weights")
        rank, bucket_bytes = self._info.rank_offset, self._info.bucket_bytes
        groups = self._groups[: len(parts)]
        is_complete = False
        with ExitStack() as open_parts:
            try:
                names = (spec.name for part in parts for spec in part)
                is_there = holds and all(name in into and into[name].is_contiguous() for name in names)
                for group in groups:
                    group.announce(rank, holds if holds and is_there else "")
                streams = [
                    open_parts.enter_context(closing(group.begin_to_receive(part, bucket_bytes, into)))
                    for group, part in zip(groups, parts, strict=True)
                ]
                yield from by_turns(parts, streams)
                self._fingerprint = fingerprint_of_stages([group.fingerprint or "" for group in groups])
                is_complete = True
            finally:
                # After any failure the two ends no longer agree on the position in the stream.
                if not is_complete:
                    open_parts.close()
                    self.leave()

    def leave(self) -> None:
        """Closes the groups, if there are any."""
        groups, self._groups, self._info = self._groups, [], None
        for group in groups:
            group.close()

    def _from_snapshot(
        self, path: Path, specs: Sequence[TensorSpec], into: Mapping[str, torch.Tensor]
    ) -> Generator[tuple[TensorSpec, torch.Tensor], None, None]:
        fingerprint = Fingerprint()
        try:
            tensors = read_snapshot(path, specs)
        except PublishError as error:
            raise RequestRefused(str(error), "update_info.snapshot") from error
        for spec, tensor in tensors:
            own = into.get(spec.name)
            taken = tensor if own is None else own.copy_(tensor)
            fingerprint.add(spec, taken.contiguous().view(-1).view(torch.uint8))
            yield spec, taken
        self._fingerprint = fingerprint.hexdigest()
