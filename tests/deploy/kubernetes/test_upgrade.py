"""A release that is there already: what another launch keeps, and what it refuses before it changes anything."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.api_server import NAMESPACE, api_server

pytestmark = pytest.mark.distributed

Objects = list[Any]


@pytest.fixture
def upgrade(render: Callable[..., Objects]) -> Callable[..., Objects]:
    """`upgrade(values, there)`: what helm makes of values where the objects `there` are in the cluster."""

    def objects(values: dict[str, Any], there: Objects) -> Objects:
        for each in there:
            owner = {"meta.helm.sh/release-name": "run", "meta.helm.sh/release-namespace": NAMESPACE}
            each["metadata"]["annotations"] = each["metadata"].get("annotations", {}) | owner
        with api_server(render(values, "cpu"), there) as url:
            cluster = ("--kube-apiserver", url, "--namespace", NAMESPACE)
            return render(values, "cpu", "--dry-run=server", "--disable-openapi-validation", *cluster)

    return objects


def one(objects: Objects, kind: str) -> Any:
    [found] = [each for each in objects if each["kind"] == kind]
    return found


def test_the_token_is_kept_since_the_pods_that_run_have_read_it(
    values_of: Callable[..., Any], render: Callable[..., Objects], upgrade: Callable[..., Objects]
) -> None:
    values = values_of()
    there = one(render(values, "cpu"), "Secret")
    assert one(upgrade(values, [there]), "Secret")["data"] == there["data"]
    assert one(upgrade(values, []), "Secret")["data"] != there["data"]


def test_what_concerns_instances_alone_can_be_changed_while_the_trainer_runs(
    values_of: Callable[..., Any], render: Callable[..., Objects], upgrade: Callable[..., Objects]
) -> None:
    values = values_of()
    there = one(render(values, "cpu"), "JobSet")
    values["instances"] |= {"min": 3, "max": 3, "env": {"NEW": "1"}}
    assert one(upgrade(values, [there]), "StatefulSet")["spec"]["replicas"] == 3


@pytest.mark.parametrize("change", [{"run.seed": 1}, {"cluster.training_nodes": 2}], ids=str)
def test_another_training_is_refused_while_one_runs(
    values_of: Callable[..., Any],
    render: Callable[..., Objects],
    upgrade: Callable[..., Objects],
    change: dict[str, object],
) -> None:
    there = one(render(values_of(), "cpu"), "JobSet")
    with pytest.raises(ValueError, match=r"release run trains with other values.*kubectl delete jobset run"):
        upgrade(values_of(change), [there])


@pytest.mark.parametrize("ended", ["Completed", "Failed"])
def test_a_training_that_has_ended_is_not_taken_for_one_that_runs(
    values_of: Callable[..., Any], render: Callable[..., Objects], upgrade: Callable[..., Objects], ended: str
) -> None:
    there = one(render(values_of(), "cpu"), "JobSet")
    there["status"] = {"conditions": [{"type": "Suspended", "status": "False"}, {"type": ended, "status": "True"}]}
    with pytest.raises(ValueError, match=rf"has ended \({ended}\): to go on .* kubectl delete jobset run"):
        upgrade(values_of(), [there])
