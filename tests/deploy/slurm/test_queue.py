from deploy.cluster.tasks import Task
from deploy.slurm.commands import QueuedJob
from deploy.slurm.queue import now

TASK = Task("instance-0", "instance", id="18_0", state="running", host="old")


def test_a_job_that_waits_shows_slurms_reason() -> None:
    told = now(TASK, QueuedJob("18_0", "pending", None, "Resources"))
    assert (told.state, told.host) == ("pending (Resources)", None)


def test_of_a_job_that_runs_the_task_itself_knows_more() -> None:
    waiting = Task("instance-0", "instance", id="18_0", state="waiting")
    assert now(waiting, QueuedJob("18_0", "running", "n2", "None")).state == "waiting"
    new = Task("instance-0", "instance", id="18_0")
    told = now(new, QueuedJob("18_0", "running", "n2", "None"))
    assert (told.state, told.host) == ("starting", "n2")


def test_a_job_that_slurm_does_not_know_any_more_is_over_however_its_task_ended() -> None:
    assert now(TASK, None).state == "over"
    for state in ("done", "failed"):
        ended = Task("trainer", "trainer", id="17", state=state)
        assert now(ended, None) == ended
