"""One run that nothing disturbs and one that loses whatever it can lose, on real parts: both train the same.

Most tests read what these two left. Their settings are two replicas, which share their batches, and two instances.
"""

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.shared.protocol.fleet import InstanceInfo, read_address
from tests.support.local_run import EVALUATION, End, Run, command_of, gone
from tests.support.mortal_instance import kill_an_engine, mortal_python
from tests.support.same_run import SETTINGS, assert_same_run
from trainer.checkpoint.files import find_damage, read_manifest

# The first test of each run waits for all of it.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

ITERATIONS = 26
"""More than the losses take, 17 on a busy machine: between them a fast one trains several."""

# Without exact mode a draw at the edge between two tokens falls to the one or the other by what is beside it.
SETTINGS_OF_BOTH = (
    *(*SETTINGS, f"--train.iterations={ITERATIONS}", "--train.exact=true"),
    *("--trainer.num_processes=2", "--inference.num_instances=2"),
)
AT_THE_END = "--checkpoint.every=1000"
"""Only the end of the run saves."""


@dataclass
class Disturbed:
    """The run, and what was seen while it went on."""

    run: Run
    ends: dict[str, End] = field(default_factory=dict)
    keeps_instances: bool = False
    keeps_ranks: bool = False
    restarts: list[int] = field(default_factory=list)
    """Of the trainer: before, and after each loss of its producer alone."""
    endpoints: set[str] = field(default_factory=set)
    """URLs of the fleet endpoint, of each of these producers."""


@pytest.fixture(scope="module")
def undisturbed(new_run: Callable[..., Run], reproducible_products: None) -> Run:
    """With an evaluation beside it, which the other one lacks."""
    run = new_run("undisturbed")
    with run.config.open("a") as config:
        config.write(EVALUATION.format(source=run.config.with_name("rows.jsonl")))
    return run.train(*SETTINGS_OF_BOTH)


@pytest.fixture(scope="module")
def disturbed(new_run: Callable[..., Run], reproducible_products: None) -> Disturbed:
    """Four starts, each of which goes on where the one before it was ended."""
    run = new_run("disturbed")
    seen = Disturbed(run)
    resumed = (*SETTINGS_OF_BOTH, "--run.resume=true")
    run.start(*resumed, AT_THE_END)
    lose_a_rank(run)
    lose_an_instance(run, kill_amid_requests)
    lose_an_instance(run, kill_while_paused)
    seen.ends["SIGTERM to a rank"] = run.end_by(run.ranks()[-1].terminate)

    run.let(0)
    run.start(*resumed, "--trainer.lost_after_s=3")
    run.wait_for_calls(1)
    instances = run.instances()
    lose_all_ranks_and_the_producer(run)
    run.wait_for_calls(2)
    lose_the_producer_in_each_phase(run, seen)
    run.wait_for_iterations(run.num_trained() + 1)
    seen.keeps_instances = run.instances() == instances
    seen.ends["kill -9"] = run.end_by(lambda: run.send(signal.SIGKILL))

    run.start(*resumed, AT_THE_END, f"--inference.python={mortal_python(run.config.parent)}")
    run.wait_for_iterations(run.num_trained() + 1)
    lose_an_instance(run, lose_the_engine)
    begin_to_restart_the_producer(run)
    seen.ends["ctrl-c"] = run.end_by(lambda: run.send(signal.SIGINT))

    run.tell("")
    run.train(*resumed)
    return seen


def lose_a_rank(run: Run) -> None:
    """One of two, while both wait for rollouts; without a checkpoint the next ones begin anew."""
    run.wait_for_iterations(1)
    run.hold()
    num_before = run.num_trained()
    run.ranks()[-1].kill()
    run.wait_until(lambda: run.restarts()["trainer"] == 1)
    run.tell("")
    run.wait_for_iterations(num_before + 1)


def lose_all_ranks_and_the_producer(run: Run) -> None:
    run.producer().kill()
    run.kill_trainer()
    run.wait_until(lambda: run.restarts()["trainer"] == 1)


OTHERWISE = {psutil.Process.kill: psutil.Process.suspend, psutil.Process.suspend: psutil.Process.kill}


def lose_the_producer_in_each_phase(run: Run, seen: Disturbed, *, otherwise: bool = False) -> None:
    """Five times, each in another iteration: it dies, or hangs; `otherwise` it hangs, or dies.

    An iteration has six calls of the reward, which has one process. The first call waits when this begins.
    """
    ranks = run.ranks()
    seen.restarts.append(run.restarts()["trainer"])

    def lose(by: Callable[[psutil.Process], None], then: Callable[[], object], until_call: int) -> None:
        """Does `then` when it is lost; returns when the iteration is trained and that call of the next one waits."""
        producer, num_trained = run.producer(), run.num_trained()
        seen.endpoints.add(read_address(run.dir).url)
        processes = [producer, *producer.children(recursive=True)]
        (OTHERWISE[by] if otherwise else by)(producer)
        then()
        run.wait_for_iterations(num_trained + 1)
        run.wait_for_calls(until_call)
        assert gone(processes), "nothing is left of the lost one"
        seen.restarts.append(run.restarts()["trainer"])

    # Before the first group.
    lose(psutil.Process.kill, lambda: run.let(6 + 2), until_call=6 + 2 + 1)
    # Between groups.
    lose(psutil.Process.suspend, lambda: run.let(6), until_call=6 + 1)
    # After the last group: the ranks train them, and cannot have the groups written before the proof.
    each(ranks, psutil.Process.suspend)
    run.let(5)
    run.wait_for_calls(5)
    time.sleep(0.5)  # The producer has sent them.
    lose(psutil.Process.suspend, lambda: (run.let(6), each(ranks, psutil.Process.resume)), until_call=6 + 1)
    # In a publish, which waits for instances. Before, for every response that the batch needs of them: the first call
    # of the reward may wait while others are generated, and those would wait for good.
    run.wait_until(lambda: not any(each.num_requests for each in run.members()))
    num_trained, instances = run.num_trained(), run.instances()
    each(instances, psutil.Process.suspend)
    run.let(5 + 6)
    run.wait_for_iterations(num_trained + 1)
    time.sleep(0.5)
    lose(psutil.Process.kill, lambda: each(instances, psutil.Process.resume), until_call=5 + 6 + 1)
    seen.keeps_ranks = run.ranks() == ranks
    seen.endpoints.add(read_address(run.dir).url)
    # In the step, or before its record, which another producer writes: the iteration is not repeated.
    run.tell("")
    stopped = stop_between_proof_and_record(run)
    if not otherwise:
        stopped.kill()
    run.wait_until(lambda: len(losses(run)) == 5)
    run.wait_for_iterations(run.num_trained() + 1)
    seen.restarts.append(run.restarts()["trainer"])
    seen.keeps_ranks = seen.keeps_ranks and run.ranks() == ranks


def stop_between_proof_and_record(run: Run) -> psutil.Process:
    """The producer, stopped there."""
    producer = run.producer()
    while True:
        num_proofs = len(run.lines("ledger.jsonl"))
        run.wait_until(lambda number=num_proofs: len(run.lines("ledger.jsonl")) > number, pause_s=0.0)
        producer.suspend()
        time.sleep(0.1)
        if len(run.lines("ledger.jsonl")) > run.num_trained():
            return producer
        producer.resume()


def each(processes: list[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        act(process)


def begin_to_restart_the_producer(run: Run) -> None:
    """Returns while it is being started, and will find no instance before these go on."""
    num_before = len(losses(run))
    run.producer().kill()
    run.wait_until(lambda: len(losses(run)) > num_before)


def losses(run: Run) -> list[str]:
    """What people who watch are told of lost producers."""
    texts = [notice["text"] for notice in run.lines("logs/notices.jsonl")]
    return [text for text in texts if "is started again, and iteration" in text]


def lose_an_instance(run: Run, lose: Callable[[Run, psutil.Process, str], None]) -> None:
    """Returns when its successor has taken part, and the run waits: however slow this is, iterations are left.

    One whose process is killed is lost while the run waits.
    """
    run.tell("")
    boot_ids = {each.boot_id for each in run.members()}
    num_restarts = sum(run.restarts().values())
    lost = run.instances()[0]
    lose(run, lost, f"http://127.0.0.1:{port_of(lost)}")
    # It may be back before the next publish, so that no record is of the other one alone.
    run.wait_until(lambda: sum(run.restarts().values()) == num_restarts + 1)
    # Or the iterations are so short that they would be over before it is back.
    run.hold()
    run.wait_until(lambda: any(are_there_again(each, boot_ids) for each in run.members()))
    run.tell("")
    num_before = run.num_trained()
    run.wait_until(lambda: run.num_trained() > num_before and run.lines("metrics.jsonl")[-1]["num_instances"] == 2)
    run.hold()


def are_there_again(member: InstanceInfo, boot_ids: set[str | None]) -> bool:
    return member.state in ("joining", "ready") and member.boot_id not in boot_ids


def kill_amid_requests(run: Run, instance: psutil.Process, url: str) -> None:
    """Its requests are made again, or have been taken over."""
    while True:
        instance.suspend()
        time.sleep(0.1)  # What it had sent has arrived.
        if member(run, url).num_requests:
            instance.kill()
            run.hold()
            return
        instance.resume()
        time.sleep(0.02)


def kill_while_paused(run: Run, instance: psutil.Process, url: str) -> None:
    """It is about to get new weights, or gets them."""
    with httpx.Client(verify=False) as client:
        run.wait_until(lambda: client.get(f"{url}/is_paused").json()["is_paused"], pause_s=0.0)
    instance.kill()
    run.hold()


def lose_the_engine(run: Run, instance: psutil.Process, url: str) -> None:
    """Of either instance, whose process is not killed."""
    kill_an_engine(run.config.parent)


def port_of(instance: psutil.Process) -> str:
    words = command_of(instance)
    return words[words.index("--port") + 1]


def member(run: Run, url: str) -> InstanceInfo:
    (found,) = [each for each in run.members() if each.url == url]
    return found


def assert_proven(run: Run, num_iterations: int) -> None:
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(num_iterations))
    assert all(proof["on_policy"] and proof["max_logprob_gap"] < 1e-3 for proof in proofs)
    assert all(proof["num_groups"] == 6 and proof["num_responses"] == 24 for proof in proofs)
    assert len({proof["weight_version"] for proof in proofs}) == num_iterations
    assert len({proof["fingerprint"] for proof in proofs}) == num_iterations, "every step changes the weights"


def test_every_iteration_is_proven_once_and_changes_the_weights(undisturbed: Run) -> None:
    assert_proven(undisturbed, ITERATIONS)


def test_records_timeline_and_tensorboard_have_every_iteration(undisturbed: Run) -> None:
    records = undisturbed.lines("metrics.jsonl")
    assert [record["iteration"] for record in records] == list(range(ITERATIONS))
    assert all(record["kl"] >= 0 and record["num_instances"] == 2 for record in records)
    groups = [(row["iteration"], row["index"]) for row in undisturbed.lines("timeline.jsonl")]
    assert groups == [(iteration, place) for iteration in range(ITERATIONS) for place in range(6)]
    assert list((undisturbed.dir / "tensorboard").iterdir())


def test_samples_are_those_of_the_first_three_prompts_of_all_replicas(undisturbed: Run) -> None:
    samples = undisturbed.lines("samples.jsonl")
    expected = [(iteration, index) for iteration in range(ITERATIONS) for index in (0, 1, 2)]
    assert [(row["iteration"], row["index"]) for row in samples] == expected
    assert all(row["prompt"] == f"Word {row['prompt_id']}: " for row in samples), samples


def test_both_instances_sample_of_what_is_trained(undisturbed: Run) -> None:
    instances = [proof["logprob_gaps"]["instances"].keys() for proof in undisturbed.lines("ledger.jsonl")]
    assert len(set().union(*instances)) == 2


def test_evaluations_are_complete_of_the_version_in_training_and_of_the_last_weights(undisturbed: Run) -> None:
    *during, last = undisturbed.lines("evaluations.jsonl")
    assert [record["iteration"] for record in during] == list(range(0, ITERATIONS, 2))
    versions = {proof["iteration"]: proof["weight_version"] for proof in undisturbed.lines("ledger.jsonl")}
    assert all(record["weight_version"] == versions[record["iteration"]] for record in during)
    assert last["iteration"] == ITERATIONS and last["weight_version"] not in versions.values()
    assert all(record["complete"] and "pass@2" in record for record in (*during, last))
    delayed = {record["iteration"]: record["evaluation_s"] for record in undisturbed.lines("metrics.jsonl")}
    assert all(record["delay_s"] <= delayed[record["iteration"]] + 1e-3 for record in during)


def test_the_model_that_is_left_can_be_loaded(undisturbed: Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(undisturbed.dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(undisturbed.dir / "model")
    tokens = torch.tensor([tokenizer("Word 1: ")["input_ids"]])
    assert model(tokens).logits.isfinite().all()


def test_the_newest_two_checkpoints_are_left_of_a_run_and_no_process(undisturbed: Run) -> None:
    names = [path.name for path in undisturbed.checkpoints()]
    assert names == [f"iteration-{number:06}" for number in (ITERATIONS - 1, ITERATIONS)]
    assert not [p for p in psutil.process_iter() if str(undisturbed.dir) in " ".join(command_of(p))]


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["tensor_parallel", "context_parallel"])
def test_a_run_goes_on_under_another_layout(key: str, undisturbed: Run, tmp_path: Path) -> None:
    run = undisturbed.copied_to(tmp_path / "run")
    more = ("--train.iterations", str(ITERATIONS + 2), f"--trainer.{key}=2", "--train.exact=false")
    try:
        run.train(*SETTINGS_OF_BOTH, "--run.resume=true", "--evaluation.every=1000", *more)
    finally:
        run.end()
    assert_proven(run, ITERATIONS + 2)


def test_a_run_that_lost_ranks_an_instance_its_host_and_its_producer_trains_what_it_would_have_trained(
    disturbed: Disturbed, undisturbed: Run
) -> None:
    assert_proven(disturbed.run, ITERATIONS)
    # A producer was lost before it had written the record of an iteration: another one knows no texts.
    assert_same_run(disturbed.run, undisturbed, num_unsampled=1)


@pytest.mark.nightly
def test_each_phase_bears_either_loss_of_its_producer(new_run: Callable[..., Run], undisturbed: Run) -> None:
    run = new_run("otherwise")
    seen = Disturbed(run)
    resumed = (*SETTINGS_OF_BOTH, "--run.resume=true", "--trainer.lost_after_s=3")
    run.let(0)
    run.start(*resumed)
    run.wait_for_calls(1)
    lose_the_producer_in_each_phase(run, seen, otherwise=True)
    assert seen.keeps_ranks and set(seen.restarts) == {0} and len(seen.endpoints) == 1
    run.end_by(run.ranks()[-1].terminate)
    run.train(*resumed)
    assert_same_run(run, undisturbed, num_unsampled=1)


def test_a_rank_that_is_killed_while_the_others_wait_is_no_request_to_end(disturbed: Disturbed) -> None:
    """torchrun sends SIGTERM to the others."""
    assert disturbed.ends["SIGTERM to a rank"].restarts["trainer"] == 1


def test_an_instance_that_dies_amid_its_requests_or_a_publish_loses_nothing_and_comes_back(
    disturbed: Disturbed,
) -> None:
    restarts = disturbed.ends["SIGTERM to a rank"].restarts
    assert restarts["trainer"] == 1 and sum(restarts.values()) == 3, restarts
    assert disturbed.run.lines("metrics.jsonl")[-1]["num_instances"] == 2


def test_an_instance_whose_engine_dies_ends_and_is_started_again(disturbed: Disturbed) -> None:
    end = disturbed.ends["ctrl-c"]
    assert sorted(end.restarts.values()) == [0, 0, 1] and end.restarts["trainer"] == 0
    assert "the generation thread died: MemoryError('told to die')" in end.output


def test_a_producer_that_dies_or_hangs_is_replaced_and_the_ranks_keep_their_weights(disturbed: Disturbed) -> None:
    """Before the first group, between groups, after the last, in a publish: the ranks are the same processes."""
    assert disturbed.keeps_ranks
    assert disturbed.restarts == [1] * 6, "that of the ranks that were killed before"
    assert len(disturbed.endpoints) == 1, "whoever knows the fleet endpoint finds it again"


def test_who_watches_is_told_of_each_lost_producer_and_of_the_iteration_that_is_repeated(disturbed: Disturbed) -> None:
    told = losses(disturbed.run)
    assert len(told) == 6, "the last one was lost when the run was told to end"
    assert all(re.match(r"the producer was lost \(the producer at \S+ port \d+ ", text) for text in told)
    assert ["has said nothing for trainer.lost_after_s = 3 s" in text for text in told[:4]] == [
        False,
        True,
        True,
        False,
    ]
    repeated = [int(text.partition("iteration ")[2].partition(" ")[0]) for text in told[:4]]
    assert [iteration - repeated[0] for iteration in repeated] == [0, 1, 2, 4]


def test_an_iteration_whose_producer_is_lost_after_the_step_is_recorded_by_another_one(disturbed: Disturbed) -> None:
    assert disturbed.ends["kill -9"].restarts["trainer"] == 1
    records = [record["iteration"] for record in disturbed.run.lines("metrics.jsonl")]
    assert records == list(range(ITERATIONS))


def test_instances_stay_when_all_ranks_or_the_producer_are_lost(disturbed: Disturbed) -> None:
    assert disturbed.keeps_instances


def test_sigterm_to_a_rank_ends_the_run_and_is_no_fault_to_restart(disturbed: Disturbed) -> None:
    end = disturbed.ends["SIGTERM to a rank"]
    assert end.code == 1 and "RunStopped" in end.output
    assert end.restarts["trainer"] == 1, "that of the rank that was killed before"


def test_an_end_saves_the_last_whole_iteration_by_itself(disturbed: Disturbed) -> None:
    """The first is the only checkpoint so far; to the second the launcher, which got the signal, waits."""
    first, second = disturbed.ends["SIGTERM to a rank"], disturbed.ends["ctrl-c"]
    assert len(first.checkpoints) == 1
    for end in (first, second):
        assert end.checkpoints[-1].name == f"iteration-{end.num_trained:06}"
        assert 1 <= end.num_trained < ITERATIONS


@pytest.mark.parametrize("name", ["SIGTERM to a rank", "kill -9", "ctrl-c"])
def test_no_process_is_left_however_a_run_ends(disturbed: Disturbed, name: str) -> None:
    end = disturbed.ends[name]
    assert end.code != 0 and not end.left_processes


def test_checkpoints_of_a_disturbed_run_are_whole(disturbed: Disturbed) -> None:
    for checkpoint in disturbed.run.checkpoints():
        assert find_damage(checkpoint, read_manifest(checkpoint)["files"]) is None


def test_ctrl_c_while_a_run_starts_leaves_no_process_behind(new_run: Callable[..., Run]) -> None:
    run = new_run("run")
    run.start("--train.iterations=500")
    run.wait_until(lambda: len(run.descendants()) >= 2)
    processes = run.descendants()
    run.send(signal.SIGINT)
    assert run.finish(30) != 0
    assert gone(processes), [command_of(p) for p in processes if p.is_running()]
