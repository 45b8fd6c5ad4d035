"""Specs of all rows as Flyte 2 gets them: their pods are Flyte 1's, and they are small."""

import pytest
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext
from flyteidl2.plugins.kubeflow.pytorch_pb2 import DistributedPyTorchTrainingTask
from google.protobuf.json_format import MessageToDict, ParseDict

from flyte2 import refresh, schedules, sweep
from flyte2.runtime import pods
from flyte2.stages import TASKS
from flytune.errors import RecipeError
from flytune.hardware import load_shapes, shape_named
from flytune.recipe import Notify, Recipe
from flytune.sharding import ONE_PROCESS
from flytune.stages import table
from tasks.evaluate import EVALUATE
from tasks.plan import make_plan
from tasks.prepare import prepare_data
from tasks.selftest import SELFTEST
from tasks.store import store_artifact
from tasks.train import TRAIN
from tests.support.flyte2_actions import ETCD
from tests.support.paths import ROOT
from tests.support.recipes import content
from tests.support.registration import proto

assert refresh
CONTEXT = SerializationContext(version="v", project="p", domain="d", org="o", root_dir=ROOT)
ROUTES = [shape.name for shape in load_shapes()] + ["a100-80gb-8" + ONE_PROCESS]
LIGHT = {"plan": make_plan, "prepare": prepare_data, "store": store_artifact}


def spec_of(task):
    return translate_task_to_wire(task, CONTEXT)


def on_shape(stage, key):
    return spec_of(TASKS[stage.name].override(**pods.on_shape(stage, key)))


def pod_of(template):
    """Return a pod's spec without what Flyte adds: image, command, and the accelerator's count."""
    pod = MessageToDict(template.k8s_pod.pod_spec)
    (container,) = pod["containers"]
    for own in ("image", "command", "args"):
        container.pop(own, None)
    for amounts in container.get("resources", {}).values():
        amounts.pop("gpu", None)
    container["env"] = [one for one in container.get("env", []) if not one["name"].startswith("FLYTE_")]
    return pod


@pytest.mark.parametrize("key", ROUTES)
@pytest.mark.parametrize(
    ("stage", "first"), [(table.TRAIN, TRAIN), (table.EVALUATE, EVALUATE), (table.SELFTEST, SELFTEST)]
)
def test_the_pods_of_a_row_are_flyte_1_s(stage, first, key):
    if key not in first:
        pytest.skip("only training has routes")
    shape, made, other = shape_named(key.removesuffix(ONE_PROCESS)), on_shape(stage, key), proto(first[key])
    template = made.task_template
    assert pod_of(template) == pod_of(other)
    assert (template.type == "pytorch") == (other.type == "pytorch")
    assert template.metadata.interruptible == shape.spot == other.metadata.interruptible
    assert template.metadata.retries.retries == shape.retries == other.metadata.retries.retries
    labels = dict(other.k8s_pod.metadata.labels)
    assert dict(template.k8s_pod.metadata.labels) == labels
    assert dict(template.k8s_pod.metadata.annotations) == dict(other.k8s_pod.metadata.annotations)
    assert template.extended_resources.HasField("gpu_accelerator") == shape.is_gpu
    if template.type == "pytorch":
        job, first_job = (
            ParseDict(MessageToDict(one.custom), DistributedPyTorchTrainingTask())
            for one in (template, other)
        )
        assert job == first_job
    assert made.ByteSize() < ETCD / 50


def test_every_row_and_driver_is_serialized_far_below_the_limit_of_etcd():
    keys = [key for key in ROUTES if not key.endswith(ONE_PROCESS)]
    sizes = {name: spec_of(task).ByteSize() for name, task in TASKS.items()}
    rows = [
        row for row in vars(table).values() if isinstance(row, table.Stage) and row.place in ("node", "shape")
    ]
    sizes |= {f"{row.name} {key}": on_shape(row, key).ByteSize() for row in rows for key in keys}
    sizes |= {"sweep": spec_of(sweep.sweep).ByteSize(), "refresh": spec_of(refresh.refresh).ByteSize()}
    assert len(sizes) > 90
    assert max(sizes.values()) < ETCD / 50, max(sizes, key=sizes.get)


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_pod_is_flyte_1_s(name):
    template, other = spec_of(TASKS[name]).task_template, proto(LIGHT[name])
    (one,), (two,) = (pod_of(task)["containers"] for task in (template, other))
    requests, first = one.pop("resources"), two.pop("resources")
    # Flyte 1 compiles what a person is asked in the pod that stores, by the images' names.
    two["env"] = [variable for variable in two["env"] if not variable["name"].endswith(("IMAGE", "IMAGES"))]
    assert one == two
    assert requests["requests"] == first["requests"]
    assert requests.get("limits", {}) == first.get("limits", {})


def test_a_row_that_is_not_there_is_refused():
    with pytest.raises(RecipeError, match="no row nowhere; there are"):
        pods.on_shape(table.TRAIN, "nowhere")


def test_max_hours_bounds_all_attempts():
    def timeouts(**hardware):
        recipe = Recipe.model_validate(content(hardware={"shape": "t4-1", **hardware}))
        overrides = pods.on_shape(table.TRAIN, "t4-1") | {
            "timeout": pods.deadline(recipe, shape_named("t4-1"))
        }
        return spec_of(TASKS["train"].override(**overrides)).task_template.metadata

    assert not timeouts().HasField("timeouts")
    # Four attempts of two hours and half an hour for the nodes to start.
    assert timeouts(max_hours=2).timeouts.deadline.seconds == 4 * 2.5 * 3600


def test_triggers_are_deployed_inactive():
    assert [
        (trigger.name, str(trigger.automation), trigger.auto_activate) for trigger in schedules.TRIGGERS
    ] == [
        ("nightly", str(schedules.flyte.Cron("0 2 * * *")), False),
        ("weekly", str(schedules.flyte.Cron("0 2 * * 1")), False),
    ]
    assert schedules.scheduled_refresh.triggers == schedules.TRIGGERS


def test_a_trigger_notifies_as_its_recipe_asks():
    asked = Notify(email=["a@b.example"], slack=["channel@slack.example"], on=["failed"])
    found = schedules.notifications(asked)
    assert [one.recipients for one in found] == [("a@b.example",), ("channel@slack.example",)]
    assert {phase.name for one in found for phase in one.on_phase} == {"FAILED", "ABORTED", "TIMED_OUT"}
    assert schedules.notifications(Notify()) == ()
