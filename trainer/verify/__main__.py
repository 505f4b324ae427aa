"""`torchrun -m trainer.verify record|record-all|replay DIR CONFIG [--section.key VALUE ...]`, for `async-rl verify`.

`record` trains as `torchrun -m async_rl.trainer` does, writes the groups of each iteration to DIR, and what their
log-probs say of each instance to `run.dir`; with `record-all` every instance must serve from the first publish on.
`replay` trains the groups in DIR, without instances. Exit codes are those of `trainer.__main__`.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from async_rl.config.sections import Config
from trainer.__main__ import run_process, training_ranks
from trainer.stop_signal import StopSignal


def record(directory: Path, config: Config, stop: StopSignal, *, needs_all: bool) -> None:
    """Trains to the end, and records."""
    with training_ranks(config, stop) as (parallel, shutdown):
        # As in `trainer.__main__`: after the config was validated, and MindSpeed before Megatron.
        from async_rl.loop import train
        from async_rl.method.proof.gap_limits import noise_limits
        from trainer.session import open_session
        from trainer.verify.recording import RecordingRank, RecordingRolloutSource
        from trainer.verify.scoring import Scorer

        with open_session(config, parallel, shutdown) as session:
            rollouts = RecordingRolloutSource(
                session.rollouts, directory if parallel.is_leader else None, parallel.dp_rank
            )
            rank = RecordingRank(
                session.rank,
                rollouts,
                config.pool.instances if needs_all else (),
                Scorer(config, parallel, session.megatron).diagnose,
                noise_limits(config.train, config.model.dtype),
                config.run.dir,
                session.control,
            )
            with shutdown.saving(session.saving.save_last):
                train(session.train, rank, session.prompts, rollouts, session.ledger, session.recorder)
                shutdown.synchronize(may_stop=False)
            session.megatron.save_hf(config.run.dir / "model")


def replay_recorded(directory: Path, config: Config, stop: StopSignal) -> None:
    """Trains what was recorded."""
    with training_ranks(config, stop) as (parallel, _):
        from trainer.verify.replay import replay

        replay(config, parallel, directory)


if __name__ == "__main__":
    action, directory, *arguments = sys.argv[1:]
    works: dict[str, Callable[[Path, Config, StopSignal], None]] = {
        "record": partial(record, needs_all=False),
        "record-all": partial(record, needs_all=True),
        "replay": replay_recorded,
    }
    run_process(arguments, partial(works[action], Path(directory)))
