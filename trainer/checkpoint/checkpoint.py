"""Saves and loads a run's checkpoints: on every rank, under any layout of the ranks.

Megatron knows where a tensor's parts are in the whole (`trainer.checkpoint.tensors`); the files are those of
torch.distributed.checkpoint, whose plans map parts of any shape to each other. Megatron's own writer for the same
format is not used: it forks the trainer, which has threads, and passes the results through a third process. Here the
tensors are copied to host memory, and a thread writes them while training continues.

`trainer.session` opens one `Checkpoints` per rank; methods that wait document what they wait for.
"""

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from async_rl.checks.preflight.resume import Contents
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, LeaderFailed, WriteFailed
from async_rl.shared.files import named_write_errors, remove_directory, write_failed
from trainer.checkpoint.compatibility import require_same_run
from trainer.checkpoint.files import (
    checkpoint_path,
    file_sums,
    find_damage,
    keep_newest,
    partial_path,
    read_manifest,
    remove_partial,
    seal,
    write_json,
)
from trainer.checkpoint.tensors import CRITIC, OLD, POLICY, model_tensors, optimizer_tensors, snapshot, storable
from trainer.critic import Critic
from trainer.parallel import TIMEOUT, Parallel
from trainer.policy.optimizer import PolicyOptimizer, StepCounts
from trainer.policy.tri_model import Frozen

_METADATA = ".metadata"
"""The file in which torch.distributed.checkpoint records which file has which part of which tensor."""


class Checkpoints:
    """The checkpoints of one run, as written by one rank; every rank creates its own object, at the same time.

    Args:
        directory: where they are written; all ranks share it.
        keep: how many of the newest ones are kept.
        config: the run's config, stored in each checkpoint.
        contents: digests of the prompts and the reward, also stored in each checkpoint.
        term: of the lease on the run's directory; the same on all ranks.
        require_lease: on the main rank only: raises Fenced if another trainer has taken over the run. Then no
            checkpoint of this one counts any more.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        parallel: Parallel,
        config: Config,
        contents: Contents | None = None,
        *,
        term: int = 0,
        require_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._parallel = parallel
        self._config = config
        self._contents = contents
        self._term = term
        self._require_lease = require_lease
        # A separate group for the writing thread, which runs while the other groups are in use.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._tensors: list[ShardedTensor] | None = None
        """This rank's, as views, which stay valid while the memory of what they view has left the device."""

    def find_tensors(
        self,
        policy: DistributedDataParallel,
        optimizer: PolicyOptimizer,
        old: Frozen | None,
        critic: Critic | None = None,
    ) -> None:
        """What `save` saves, while it is on the device; all ranks call it.

        Args:
            old: the old policy, if its weights are kept for longer than an iteration.
        """
        self._tensors = optimizer_tensors(policy.module, optimizer.parameter_states())
        if old is not None:
            with old.resident() as model:
                self._tensors += model_tensors(model, OLD)
        if critic is not None:
            self._tensors += optimizer_tensors(critic.value_model, critic.optimizer.parameter_states(), CRITIC)

    def save(self, iteration: int, optimizer: PolicyOptimizer, outdated: Path | None = None) -> None:
        """Copies everything to host memory and starts writing it; returns before it is written.

        Waits for the previous save, so that there is never more than one copy. All ranks call it, after `find_tensors`.

        Args:
            iteration: the next iteration to train.
            outdated: a directory that is removed first, if it is there.

        Raises:
            Exception: the failure of the previous save.
        """
        self.wait()
        assert self._tensors is not None, "nothing was found to be saved"
        tensors = snapshot(self._tensors)
        content = {
            "iteration": iteration,
            "num_steps": optimizer.counts.taken,
            "num_skipped": optimizer.counts.skipped,
            "num_skipped_in_a_row": optimizer.counts.skipped_in_a_row,
            "config": self._config.model_dump(mode="json"),
            "layout": _layout(self._parallel),
        }
        if self._contents is not None:
            content["contents"] = self._contents.as_json()
        if outdated is not None and self._parallel.is_main:
            self._require_lease()
            with named_write_errors(outdated):
                remove_directory(outdated)
        self._writing = self._thread.submit(self._write, iteration, tensors, content, random_state(self._parallel))

    def wait(self) -> None:
        """Waits until the last save is complete, on all ranks.

        Raises:
            Exception: the failure of that save.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def require_no_failure(self) -> None:
        """Raises the failure of the last save, if it has failed; does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """Waits for the last save; to be called before the process groups are destroyed.

        Raises:
            Exception: the failure of that save.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def load(
        self,
        path: Path,
        policy: DistributedDataParallel,
        optimizer: PolicyOptimizer,
        old: Frozen | None,
        critic: Critic | None = None,
    ) -> int:
        """Fills models and optimizer from a checkpoint; returns the iteration to train next.

        All ranks call it, under any layout. Random states are restored if the layout is the one that saved.

        Raises:
            ConfigError: on all ranks; the checkpoint is damaged, or belongs to another run or model.
        """
        content = read_checked(path, self._parallel)
        require_same_run(content["config"], self._config, str(path), content.get("contents"), self._contents)
        # Filled separately: the weights and their masters have the same names.
        self._fill(path, model_tensors(policy.module, POLICY))
        self._fill(path, optimizer_tensors(policy.module, optimizer.parameter_states()))
        stored = _prefixes(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        if old is not None and OLD not in stored:
            # The saved run had none: as at a run's start it is the policy.
            old.copy_from(policy.module)
        elif old is not None:
            with old.resident() as model:
                self._fill(path, model_tensors(model, OLD))
                old.copy_from(model)
        if critic is not None and CRITIC not in stored:
            raise ConfigError(
                f"checkpoint {str(path)!r} has no critic, which algorithm.name = {self._config.algorithm.name!r} goes "
                "on with: set the algorithm back, or give this run a directory of its own (run.dir)"
            )
        if critic is not None:
            self._fill(path, model_tensors(critic.value_model, CRITIC))
            self._fill(path, optimizer_tensors(critic.value_model, critic.optimizer.parameter_states(), CRITIC))
        counts = StepCounts(*(content[key] for key in ("num_steps", "num_skipped", "num_skipped_in_a_row")))
        iteration = int(content["iteration"])
        optimizer.resume(counts, iteration)
        if critic is not None:
            # It takes a step with the policy or none.
            critic.optimizer.resume(counts, iteration)
        if _layout_that_saved(content["layout"]) == _layout(self._parallel):
            set_random_state(self._parallel, _read_rank_file(path, self._parallel.rank)["random_state"])
        return iteration

    def _fill(self, path: Path, tensors: Sequence[ShardedTensor]) -> None:
        fill(path, tensors, self._parallel, self._group)

    def _write(
        self, iteration: int, tensors: Sequence[ShardedTensor], content: dict[str, Any], random: dict[str, str]
    ) -> None:
        """Runs in the thread, on all ranks together."""
        partial = partial_path(self._directory, iteration, self._term)
        self._on_all(partial, lambda: self._begin(partial))
        try:
            dcp.save(
                storable(tensors),
                storage_writer=dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group,
            )
        except dcp.CheckpointException as error:
            # Raised on all ranks; a BaseException whose message has the tracebacks of all failed ranks.
            first, _ = next(iter(error.failures.values()))
            raise write_failed(partial, first) from error
        self._on_all(partial, lambda: self._note_own_files(partial, random))
        self._on_all(partial, lambda: self._finish(partial, iteration, content))

    def _begin(self, partial: Path) -> None:
        if self._parallel.is_main:
            self._require_lease()
            remove_partial(self._directory)
            partial.mkdir(parents=True)

    def _note_own_files(self, partial: Path, random: dict[str, str]) -> None:
        rank = self._parallel.rank
        names = [file.name for file in partial.glob(f"__{rank}_*")]
        write_json(partial / _rank_file(rank), {"files": file_sums(partial, names), "random_state": random})

    def _finish(self, partial: Path, iteration: int, content: dict[str, Any]) -> None:
        if self._parallel.is_main:
            ranks = range(self._parallel.num_ranks)
            files = file_sums(partial, [_METADATA, *map(_rank_file, ranks)])
            for rank in ranks:
                files |= _read_rank_file(partial, rank)["files"]
            self._require_lease()
            seal(partial, checkpoint_path(self._directory, iteration), {**content, "files": files})
            keep_newest(self._directory, self._keep)

    def _on_all(self, partial: Path, work: Callable[[], None]) -> None:
        """Does this rank's `work` on a checkpoint and waits for that of all ranks, which fail together: the others
        would wait for one that has failed alone.

        Raises:
            WriteFailed: a rank cannot write.
            Fenced: another trainer has taken over the run; the other ranks raise `LeaderFailed`.
        """
        failure: AsyncRLError | None = None
        try:
            with named_write_errors(partial):
                work()
        except AsyncRLError as error:
            failure = error
        said = self._parallel.gather_json(failure and [type(failure).__name__, str(failure)], self._group)
        if failure is not None:
            raise failure
        if told := next(filter(None, said), None):
            kind, text = told
            raise WriteFailed(text) if kind == WriteFailed.__name__ else LeaderFailed(f"another training rank: {text}")


def read_checked(path: Path, parallel: Parallel) -> dict[str, Any]:
    """The manifest of a checkpoint whose files were verified; the ranks share the work of reading them.

    Raises:
        ConfigError: on all ranks; a file is missing or altered.
    """
    content = read_manifest(path)
    share = sorted(content["files"])[parallel.rank :: parallel.num_ranks]
    damage = find_damage(path, {name: content["files"][name] for name in share})
    _raise_together(damage, parallel)
    return content


def fill(path: Path, tensors: Sequence[ShardedTensor], parallel: Parallel, group: dist.ProcessGroup | None) -> None:
    """Reads this rank's parts of tensors from a checkpoint into their data, which may have another dtype.

    All ranks of `group`, that is all ranks of the run, call it.

    Raises:
        ConfigError: on all ranks; the tensors are not those of the checkpoint with the same prefixes.
    """
    _require_same_tensors(path, tensors, parallel)
    dcp.load(
        storable(tensors),
        storage_reader=dcp.FileSystemReader(path),
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


def _require_same_tensors(path: Path, tensors: Sequence[ShardedTensor], parallel: Parallel) -> None:
    """Checks that the checkpoint has each of the tensors, and no other tensor with one of their prefixes."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = {tensor.key: list(tensor.global_shape) for tensor in tensors}
    for part in parallel.gather_json(wanted):
        wanted |= part
    prefixes = _prefixes(wanted)
    found = {
        key: list(entry.size)
        for key, entry in stored.items()
        if key.split(".")[0] in prefixes and isinstance(entry, TensorStorageMetadata)
    }
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            raise ConfigError(
                f"checkpoint {str(path)!r} is of another model: {key} has shape {found.get(key, 'none')}, but the "
                f"model's is {wanted.get(key, 'none')}: set model.path and [adapter] to what the run began with"
            )


def _prefixes(keys: Iterable[str]) -> set[str]:
    """Whose tensors these are: the policy's, its moments, and so on."""
    return {key.split(".")[0] for key in keys}


def _raise_together(error: ConfigError | None, parallel: Parallel) -> None:
    """Raises the first rank's error on all ranks, so that no rank waits for one that has exited."""
    found = [text for text in parallel.gather_json(error and str(error)) if text]
    if found:
        raise ConfigError(found[0]) from error


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05}.json"


def _read_rank_file(path: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((path / _rank_file(rank)).read_bytes()))


def _layout(parallel: Parallel) -> dict[str, int]:
    return {
        "ranks": parallel.num_ranks,
        "tensor_parallel": parallel.tp_size,
        "context_parallel": parallel.cp_size,
        "pipeline_parallel": parallel.pp_size,
        "virtual_pipeline_parallel": parallel.num_chunks,
        "expert_parallel": parallel.ep_size,
    }


def _layout_that_saved(layout: dict[str, int]) -> dict[str, int]:
    """Checkpoints of earlier releases do not say what those had one of."""
    return {"context_parallel": 1, "virtual_pipeline_parallel": 1, **layout}


_HOST = "host"
_DEVICE = "device"
_TRACKED = "megatron:"


def random_state(parallel: Parallel) -> dict[str, str]:
    """All generators that a rank draws from: torch's on host and device, and those that Megatron keeps separately."""
    states = {_HOST: torch.get_rng_state()}
    if parallel.device.DEVICE.type != "cpu":
        states[_DEVICE] = torch.get_device_module(parallel.device.DEVICE).get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    states |= {_TRACKED + name: state for name, state in tracked.items()}
    return {name: base64.b64encode(state.cpu().numpy().tobytes()).decode() for name, state in states.items()}


def set_random_state(parallel: Parallel, encoded: dict[str, str]) -> None:
    """Restores what `random_state` returned on the rank with the same position in the layout."""
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8) for name, state in encoded.items()
    }
    torch.set_rng_state(states[_HOST])
    if _DEVICE in states and parallel.device.DEVICE.type != "cpu":
        torch.get_device_module(parallel.device.DEVICE).set_rng_state(states[_DEVICE])
    tracked = {name.removeprefix(_TRACKED): state for name, state in states.items() if name.startswith(_TRACKED)}
    get_cuda_rng_tracker().set_states(tracked)
