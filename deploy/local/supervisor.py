"""Keeps the processes of a local run going until its trainer has ended; for `deploy.local.run`.

A trainer that died is started again with `run.resume`, while the instances stay. An instance that died is started
again on its port, and joins the pool again with the next publish. One that keeps a device from the trainer is ended.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from async_rl.config.sections import Config
from async_rl.errors import RunDirInUse, WriteFailed
from async_rl.shared.locks.process_identity import this_process
from async_rl.shared.programs.end_request import asked_to_end, withdraw
from deploy.cluster.process import Running
from deploy.cluster.restarts import Restarts, num_trained
from deploy.cluster.run_view import RunFeed, RunView
from deploy.cluster.supervised_process import ENDED, SupervisedProcess
from deploy.cluster.tasks import LEFT, Task, remove_tasks, write_launch
from deploy.local.processes import POLL_S, Deployment

RESUME = "--run.resume=true"


class Supervisor:
    """Watches the trainer and the instances of a run, which have been started, and starts again what dies.

    It is made before the trainer begins, which waits at its gate.

    Args:
        urls: of the instances, in their order.
        view: shows the run's progress, and what was lost and started again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: Config,
        deployment: Deployment,
        instances: Sequence[Running],
        trainer: Running,
        view: RunView,
    ) -> None:
        self._run_dir = config.run.dir
        self._view = view
        self._feed = RunFeed(self._run_dir)
        self._written: tuple[Task, ...] = ()
        self._has_left = False

        def keep(running: Running, url: str | None, again: tuple[str, ...] = ()) -> SupervisedProcess:
            restarts = Restarts(config.cluster.max_restarts)
            trained = partial(num_trained, self._run_dir, None if url is None else url.__eq__)
            return SupervisedProcess(running, deployment.start, restarts, trained, again)

        self._instances = [keep(running, url) for running, url in zip(instances, urls, strict=True)]
        self._by_url = dict(zip(urls, self._instances, strict=True))
        self._ending: dict[str, Running] = {}
        """Processes that the request which stands has ended, by their URLs: each is killed once."""
        self._trainer = keep(trainer, None, (RESUME,))
        # A first start that finds another trainer would go on with that one's run.
        self._trainer.final_at_first = None if config.run.resume else RunDirInUse.__name__
        # What an earlier launch has left; this trainer has asked nothing yet, since it waits at its gate.
        remove_tasks(self._run_dir)
        withdraw(self._run_dir)

    def run(self) -> None:
        """Returns when the trainer has trained to the end.

        Raises:
            ProcessFailed: the trainer failed in a way that no restart mends, or no instance is left.
            RestartsExhausted: it failed more often than `cluster.max_restarts` without progress.
        """
        while not self._has_ended():
            self._write_tasks()
            time.sleep(POLL_S)
        self._write_tasks()
        if self._trainer.failure is not None:
            raise self._trainer.failure

    def note_end(self) -> None:
        """Writes that nothing of the run is left: its processes have been ended, whatever ended the run."""
        self._has_left = True
        self._write_tasks()

    def _end_asked(self) -> None:
        """Kills instances that keep a device from the trainer; the request is answered when all it names have ended.

        One that names others as well, which run elsewhere, is not answered.
        """
        asked = asked_to_end(self._run_dir)
        self._ending = {url: p for url, p in self._ending.items() if url in asked or p.exit_code() is None}
        for url in asked.keys() & self._by_url.keys() - self._ending.keys():
            self._ending[url] = self._by_url[url].running
            self._by_url[url].kill(asked[url])
        have_ended = all(process.exit_code() is not None for process in self._ending.values())
        # Without a request there is none to answer: one that has come since would be lost.
        if asked and asked.keys() <= self._ending.keys() and have_ended:
            withdraw(self._run_dir)

    def _has_ended(self) -> bool:
        self._end_asked()
        for instance in self._instances:
            self._say(instance.check())
        if all(instance.state in ENDED for instance in self._instances):
            self._trainer.restart_no_more()
        event = self._trainer.check()
        self._feed.show_new(self._view)
        if self._trainer.state in ENDED:
            return True
        self._say(event)
        return False

    def _say(self, event: str | None) -> None:
        if event is not None:
            self._view.note(event)

    def _write_tasks(self) -> None:
        """Writes the record of all tasks if anything has changed."""
        tasks = tuple(map(_task, [self._trainer, *self._instances]))
        if self._has_left:
            tasks = tuple(task if task.state in ENDED else replace(task, state=LEFT) for task in tasks)
        if tasks != self._written:
            self._written = tasks
            try:
                write_launch(self._run_dir, "local", tasks, this_process())
            except WriteFailed as error:
                # No reason to end the run; a trainer that cannot write ends by itself, with the error to show.
                self._say(f"async-rl status does not show the present state: {error}")


def _task(kept: SupervisedProcess) -> Task:
    process = kept.process
    return Task(
        name=process.name,
        role=process.role,
        host=socket.gethostname(),
        id=str(kept.running.pid),
        state=kept.state,
        restarts=kept.restarts.total,
        log=str(process.log_file),
        cause=kept.cause,
    )
