import os
import stat
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.file import parse_config
from async_rl.errors import ConfigError
from deploy.cluster.plan import ClusterPlan, plan_cluster
from deploy.slurm.__main__ import describe, scripts
from deploy.slurm.files import folder_of, token_file, write_token
from deploy.slurm.scripts import instances_script, node_script, training_script


def make_plan(tmp_path: Path, **changes: Any) -> ClusterPlan:
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "mine")},
        "model": {"path": "a-model", "dtype": "bfloat16"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 16, "max_prompt_tokens": 100},
        "rollout": {"max_response_tokens": 28},
        "reward": {"name": "math"},
        "train": {"iterations": 3},
        "trainer": {"num_processes": 8, "device": "cuda"},
        "inference": {"num_instances": 4, "engine": "vllm", "tensor_parallel": 2},
    }
    return plan_cluster(Path("c.toml"), parse_config({**tree, **changes}, source="test"), ["--run.seed=3"])


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_training_job_has_all_training_nodes_and_what_each_needs(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, cluster={"training_nodes": 2, "slurm_options": ["--partition=gpu"]})
    given = options(training_script(plan))
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=9", "--gres=gpu:8", "--requeue"} <= set(given)
    assert "--job-name=mine-training" in given and given[-1] == "--partition=gpu"
    assert "--signal=B:USR1@200" in given, "120 s to save, 20 s more to be killed, and a minute's margin"
    assert "srun --nodes=2 --ntasks-per-node=1" in training_script(plan)


def test_each_node_starts_torchrun_with_its_own_rank(tmp_path: Path) -> None:
    script = node_script(make_plan(tmp_path, cluster={"training_nodes": 2}))
    assert '--nnodes 2 --node-rank "$SLURM_NODEID"' in script and '--master-addr "$SLURM_LAUNCH_NODE_IPADDR"' in script
    assert "--run.seed=3" in script and "--run.resume=true" in script


def test_every_task_and_rank_that_is_stopped_is_noticed(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, trainer={"num_processes": 8, "device": "cuda", "lost_after_s": 12.0})
    for script in (training_script(plan), node_script(plan), instances_script(plan)):
        assert script.count(" --stopped-after-s 42.0 ") == 1


def test_instances_are_an_array_whose_tasks_register_by_the_runs_directory(tmp_path: Path) -> None:
    script = instances_script(
        make_plan(tmp_path, cluster={"max_instances": 6, "slurm_options": {"instances": ["--nice=5"]}})
    )
    given = options(script)
    assert {"--array=0-5", "--nodes=1", "--gres=gpu:2", "--cpus-per-task=3", "--requeue"} <= set(given)
    assert f"--output={tmp_path}/mine/logs/instance-%a.log" in given and given[-1] == "--nice=5"
    assert f'--register {tmp_path}/mine --name "instance-$SLURM_ARRAY_TASK_ID"' in script
    assert '--training-job "$1"' in script


def test_npus_are_taken_as_whole_nodes_since_slurm_does_not_tell_their_numbers(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, trainer={"num_processes": 8, "device": "npu"})
    assert {"--gres=npu:8", "--exclusive"} <= set(options(training_script(plan)))
    assert "export ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in node_script(plan)
    assert "export ASCEND_RT_VISIBLE_DEVICES=0,1\n" in instances_script(plan)


def test_on_cpus_no_devices_are_asked_for(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, trainer={"device": "cpu"}, inference={})
    for text in scripts(plan).values():
        assert "--gres" not in text and "--exclusive" not in text and "VISIBLE_DEVICES" not in text


def test_words_of_the_user_reach_the_program_as_they_are(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, cluster={"env": {"MINE": "a b; rm $HOME"}}, model={"path": "my model's"})
    assert "export MINE='a b; rm $HOME'" in training_script(plan)
    assert "--model 'my model'\"'\"'s'" in instances_script(plan)


@pytest.mark.parametrize("option", ["--time=1:00\n#SBATCH --uid=0", "--comment=\0", "partition=gpu", ""])
def test_an_option_is_one_word_of_one_line(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.slurm_options"):
        make_plan(tmp_path, cluster={"slurm_options": [option]})


@pytest.mark.parametrize("option", ["--array=0-3", "-a0-3", "--wrap=ls", "--wait", "-W", "--test-only", "-d after:1"])
def test_an_option_that_decides_what_a_job_is_belongs_to_the_launcher(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match="belongs to the launcher: leave it out"):
        make_plan(tmp_path, cluster={"slurm_options": [option]})
    make_plan(tmp_path, cluster={"slurm_options": ["--wait-all-nodes=1", "-w node-1", "--account=wrap", "-A", "- "]})


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A;touch x", "$(id)", "A\nB", "Ä"])
def test_a_variable_has_a_name_that_a_shell_takes_for_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.env"):
        make_plan(tmp_path, cluster={"env": {name: "x"}})


def test_a_token_in_the_environment_of_all_tasks_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it in the environment of the launcher") as refused:
        make_plan(tmp_path, cluster={"env": {"ASYNC_RL_TOKEN": "secret"}})
    assert "secret" not in str(refused.value)


def test_a_path_that_sbatch_would_misread_is_refused(tmp_path: Path) -> None:
    """Backslashes are escapes for sbatch, within quotes too."""
    for name in ("a\\b", "a\nb"):
        with pytest.raises(ConfigError, match=r"name a run\.dir without backslashes"):
            scripts(make_plan(tmp_path, run={"dir": str(tmp_path / name)}))


def test_a_run_in_the_working_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_plan(tmp_path, run={"dir": "."}).name == tmp_path.name


def test_the_token_is_in_a_file_that_only_its_user_reads_and_in_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path)
    run_dir = plan.config.run.dir
    folder_of(run_dir).mkdir(parents=True)
    before = os.umask(0)
    try:
        write_token(run_dir, "secret of the user")
    finally:
        os.umask(before)
    assert stat.S_IMODE(token_file(run_dir).stat().st_mode) == 0o600
    assert "secret of the user" not in describe(plan)
    token_file(run_dir).chmod(0o644)
    write_token(run_dir, None)
    assert token_file(run_dir).read_text() == "secret of the user", "a run that is launched again keeps its token"
    assert stat.S_IMODE(token_file(run_dir).stat().st_mode) == 0o600


def test_a_run_without_a_token_gets_one(tmp_path: Path) -> None:
    tokens = set()
    for name in ("a", "b"):
        folder_of(tmp_path / name).mkdir(parents=True)
        write_token(tmp_path / name, None)
        tokens.add(token_file(tmp_path / name).read_text())
    assert len(tokens) == 2 and all(len(token) > 30 for token in tokens)


def test_the_plan_shows_every_script_and_the_commands_that_submit_them(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    shown = describe(plan)
    assert all(text in shown for text in scripts(plan).values())
    assert f"sbatch --parsable {tmp_path}/mine/slurm/training.sbatch" in shown
    assert (
        f"sbatch --parsable --dependency=after:TRAINING_JOB {tmp_path}/mine/slurm/instances.sbatch TRAINING_JOB"
        in shown
    )
    assert not (tmp_path / "mine").exists(), "nothing is written"
