"""Whether the groups that were trained are those that the recorded rewards select; for the ledger.

Each leader selects from its own share of the batch, so that no leader waits for another one.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.prompt_ids import as_runs, digest_of_ids
from async_rl.method.selection.rule import Selection
from async_rl.method.types import Batch, have_signal


def selection_violations(batch: Batch, num_replicas: int, rows: Sequence[GroupProof]) -> Iterator[str]:
    """What the rows of a batch with a reserve, trained or left out, say against its selection.

    It must follow from their rewards alone: exactly the selected groups are trained, exactly those that the selection
    passed over have a row besides them.
    """
    for index, count in Counter(row.index for row in rows).items():
        if count > 1 and index in batch.prompts:
            yield f"group {index} (prompt {batch.prompts[index].prompt_id!r}) has {count} rows, expected 1"
    for rank in range(num_replicas):
        share = batch.share(rank, num_replicas)
        yield from _of_share(share, [row for row in rows if row.index in share.prompts])


def _of_share(share: Batch, rows: Sequence[GroupProof]) -> Iterator[str]:
    selection = Selection(share)
    for row in rows:
        selection.add_group(row.index, row.rewards)
    if not selection.is_decided:
        present = {row.index for row in rows}
        index = next(index for index in sorted(share.prompts) if index not in present)
        yield (
            f"group {index} (prompt {share.prompts[index].prompt_id!r}) was neither trained nor left out, and without "
            f"its rewards the {share.num_trained} groups that its leader trains are not known"
        )
        return
    selected, left_out = set(selection.in_order()), set(selection.left_out())
    for row in sorted(rows, key=lambda row: row.index):
        rewards = "differ" if have_signal(row.rewards) else "are all equal"
        name = f"group {row.index} (prompt {row.prompt_id!r}, whose rewards {rewards})"
        if row.is_trained and row.index not in selected:
            yield f"{name} was trained, but the rewards of its leader's groups select {_shown(selected)}"
        elif not row.is_trained and row.index in selected:
            yield f"{name} was left out, but the rewards of its leader's groups select {_shown(selected)}"
        elif not row.is_trained and row.index not in left_out:
            yield f"{name} was left out, but the selection was complete without it: {_shown(selected)}"


def selection_record(batch: Batch, num_replicas: int, rows: Sequence[GroupProof]) -> dict[str, Any]:
    """The selection in the ledger; lists of indices are null where they are long (`as_runs`)."""
    rows = sorted(rows, key=lambda row: row.index)
    left_out = [row for row in rows if not row.is_trained]
    return {
        "num_drawn": len(batch.prompts),
        "num_replicas": num_replicas,
        "trained": as_runs([str(row.index) for row in rows if row.is_trained]),
        "left_out": as_runs([str(row.index) for row in left_out]),
        "num_left_out": len(left_out),
        "num_without_signal": sum(row.is_trained and not have_signal(row.rewards) for row in rows),
        "drawn_ids_sha256": digest_of_ids(batch.prompts[index].prompt_id for index in sorted(batch.prompts)),
    }


def _shown(indices: Collection[int]) -> str:
    return ", ".join(as_runs(list(map(str, sorted(indices)))) or ["too many to show"])
