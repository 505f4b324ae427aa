"""Values that are wrong, one by one and all at once: helm refuses each and names it; odd ones arrive as they are."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes.__main__ import CHART
from tests.support.strict_schema import check

pytestmark = pytest.mark.distributed

SCHEMA: Mapping[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: Mapping[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

Keys = tuple[str, ...]
Values = dict[str, Any]

OUT_OF_RANGE = {
    "engine": "slurm",
    "image.trainer": "registry/image@sha256:12",
    "image.instance": "two words",
    "run.fleetPort": 65536,
    "storage.size": "10 GB",
    "storage.accessModes": [],
    "storage.mountPath": "/",
    "storage.existingClaim": "Shared_Claim",
    "token.key": "a key",
    "training.nodes": 0,
    "training.ports.master": 0,
    "training.gracePeriodSeconds": 0,
    "training.shmSize": "much",
    "training.tolerations": ["all"],
    "training.resources.limits": {"memory": True},
    "training.env": {"ASYNC_RL_TOKEN": "secret"},
    "instances.min": 0,
    "instances.hosts": 0,
    "instances.startSeconds": 0,
    "podMonitor.interval": "often",
    "autoscaling.prometheusUrl": "prometheus:9090",
    "autoscaling.scaleDownAfterSeconds": 3601,
    "ray.backoffLimit": -1,
}
CONFIG_TEXT = '# {{ .Values }} $(HOME) $$ \u2028 \U0001f389 \x7f\nx = """\n  it\'s \\\\ \n\n---\n- : {}\n\t%"""\n\n'
WORD = '{{ x }} it\'s "a: b" - #c %\n\t\x1b[0m \\ 中'


def parts(schema: Mapping[str, Any], path: Keys = ()) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """Every key of the schema with what it expects; of sections, those after the section itself."""
    if path:
        yield path, schema
    for key, part in schema.get("properties", {}).items():
        yield from parts(part, (*path, key))


def nested(entries: Mapping[Keys, object]) -> Values:
    tree: Values = {}
    for path, value in entries.items():
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return tree


def said_of(helm: Path, values: Values) -> str:
    """What helm says when it refuses the values."""
    command = [helm, "template", "run", CHART, "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), text=True, capture_output=True)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_every_value_of_a_wrong_type_is_named(helm: Path) -> None:
    leaves = {path: part for path, part in parts(SCHEMA) if "properties" not in part}
    assert len(leaves) > 60
    said = said_of(helm, nested({path: "x" if part.get("type") == "object" else 7.5 for path, part in leaves.items()}))
    for path in leaves:
        assert f"at '/{'/'.join(path)}': " in said, said


def test_unknown_keys_are_named_in_every_section(helm: Path) -> None:
    sections = [path for path, part in parts(SCHEMA) if "properties" in part]
    assert len(sections) > 12
    said = said_of(helm, nested({(*path, "misspelt"): 1 for path in [(), *sections]}))
    for path in sections:
        assert f"at '/{'/'.join(path)}': additional properties 'misspelt' not allowed" in said, said
    assert "at '': additional properties 'misspelt' not allowed" in said


def test_values_that_are_out_of_range_are_named(helm: Path) -> None:
    said = said_of(helm, nested({tuple(key.split(".")): value for key, value in OUT_OF_RANGE.items()}))
    for key in OUT_OF_RANGE:
        # Of a section with names of the user's, the section.
        assert f"'/{key.replace('.', '/').removesuffix('/env')}" in said, (key, said)


def test_a_default_that_is_needed_cannot_be_removed(helm: Path) -> None:
    """`null` in a file of values removes a default."""
    needed = [
        path
        for path, part in parts(SCHEMA)
        if "properties" not in part
        and default_of(path) not in (None, "", [], {})
        and path[:2] != ("ray", "headResources")
        and path[-1] != "labels"
        and path[0] != "podSecurityContext"
    ]
    assert len(needed) > 25
    said = said_of(helm, nested(dict.fromkeys(needed)))
    for path in needed:
        [line] = [
            line for line in said.splitlines() if f"at '{''.join(f'/{key}' for key in path[:-1])}': missing" in line
        ]
        assert f"'{path[-1]}'" in line, (path, said)


def default_of(path: Keys) -> Any:
    found: Any = DEFAULTS
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


@pytest.mark.parametrize("engine", ["jobset", "ray"])
@pytest.mark.parametrize("release", ["on", "null", "y", "a--b", "x" * 40])
def test_names_of_releases_stay_names(
    values_of: Callable[..., Values], render: Callable[..., list[Any]], release: str, engine: str
) -> None:
    values = values_of({"cluster.max_instances": 3}, release=release, engine=engine)
    for each in render(values, "elastic", release=release):
        check(each)
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == release


@pytest.mark.parametrize("release", ["x" * 41, "1run", "a.b"])
def test_names_that_services_and_pods_cannot_have_are_refused(
    values_of: Callable[..., Values], render: Callable[..., list[Any]], release: str
) -> None:
    with pytest.raises(ValueError, match=r"is called .*: expected at most 40 lower-case letters"):
        render(values_of(release=release), "cpu", release=release)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "does not name other-trainer-0-0.other, the first training pod of release"),
        ({"run": {"fleetPort": 8601}}, "run.fleetPort is 8601, but training.command has another"),
        ({"training": {"ports": {"master": 1}}}, "training.ports.master is 1, but"),
        ({"instances": {"port": 80}}, "instances.port is 80, but"),
        ({"instances": {"hosts": 2}}, "instances.workerCommand is empty"),
        ({"instances": {"min": 2}}, "instances.max is 1, less than instances.min, 2"),
        ({"run": {"dir": "runs/../../x"}}, "may leave the volume"),
        ({"storage": {"mountPath": "/tmp"}}, "where pods have another volume"),
        ({"run": {"fleetPort": 29500}}, "another --pool.fleet_address"),
    ],
    ids=str,
)
def test_values_that_contradict_the_commands_are_refused(
    values_of: Callable[..., Values], render: Callable[..., list[Any]], change: Values, said: str
) -> None:
    values = values_of(release="run")
    for section, part in change.items():
        values[section] = values.get(section, {}) | part
    with pytest.raises(ValueError, match=said):
        render(values, "cpu", release="run" if change else "other")


def test_a_config_and_words_of_any_text_arrive_as_they_are(
    values_of: Callable[..., Values], render: Callable[..., list[Any]]
) -> None:
    values = values_of()
    values["run"]["config"] = CONFIG_TEXT
    for pool in ("training", "instances"):
        values[pool]["env"] |= {"NO": "1e3", "TEXT": WORD}
        values[pool]["command"] += [WORD, "yes", "0x10"]
    objects = {each["kind"]: each for each in render(values, "cpu")}
    assert objects["ConfigMap"]["data"]["run.toml"] == CONFIG_TEXT
    job = objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    for template in (job, objects["StatefulSet"]["spec"]["template"]):
        [container] = template["spec"]["containers"]
        assert container["args"][-3:] == [WORD, "yes", "0x10"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert (env["NO"], env["TEXT"]) == ("1e3", WORD)


def test_a_trainer_that_is_started_again_reads_the_config_that_it_began_with(
    values_of: Callable[..., Values], render: Callable[..., list[Any]]
) -> None:
    """Another config is another ConfigMap, so JobSet refuses the change instead of following it at the next restart."""
    values = values_of()
    mounted = []
    for text in ("seed = 1", "seed = 2"):
        values["run"]["config"] = text
        objects = {each["kind"]: each for each in render(values, "cpu")}
        spec = objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        [volume] = [each for each in spec["volumes"] if each["name"] == "config"]
        assert volume["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
        mounted.append(volume["configMap"]["name"])
        # Instances do not read it, and are not made anew.
        assert "config" not in [each["name"] for each in objects["StatefulSet"]["spec"]["template"]["spec"]["volumes"]]
    assert mounted[0] != mounted[1]
