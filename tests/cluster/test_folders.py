"""Tests of the folders that a recipe names, compared with the volumes of a cluster's pods."""

import io

import pytest
import yaml
from rich.console import Console

from flytune.cli import main
from flytune.cluster import folders
from flytune.errors import RecipeError
from flytune.hardware import Cluster
from flytune.planning import planner
from tests.support.plans import GEOMETRY, recipe_of
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

TEAM = {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"}
SHAPE = "h100-8x8"


def problems(*rows, shape=SHAPE, uploaded=True, **changes):
    return folders.problems(recipe_of(**changes), Cluster(volumes=list(rows)), shape, uploaded)


def kept(folder="/mnt/team/runs"):
    return {"checkpoints": {"folder": folder, "save_steps": 1}}


@pytest.mark.parametrize("folder", [None, "s3://bucket/runs", "/mnt/team/runs", "/mnt/team"])
def test_what_pods_have_is_no_problem(folder):
    assert problems(TEAM, checkpoints={"folder": folder}) == []


@pytest.mark.parametrize("folder", ["own/models", ".", "./x", "../runs"])
def test_a_relative_folder_that_is_written_would_be_on_a_pod_s_own_disk(folder):
    said = problems(TEAM, checkpoints={"folder": folder}, publish={"address": folder})
    assert [
        one.partition(": a relative path is a folder on a pod's own disk, lost with it; name an")[0]
        for one in said
    ] == [
        f"checkpoints.folder: {folder}",
        f"publish.address: {folder}",
    ]


@pytest.mark.parametrize(
    ("volume", "told"),
    [
        (
            TEAM | {"mount_path": "/mnt/teams"},
            f"no volume of cluster.yaml is mounted there in the pods of {SHAPE}; add one to",
        ),
        (
            TEAM | {"shapes": ["h100-8"]},
            f"volume team of cluster.yaml is not mounted into the pods of {SHAPE}; add {SHAPE} to",
        ),
        (TEAM | {"light_tasks": False}, "is not mounted into the light tasks' pods; set light_tasks: true"),
        (
            TEAM | {"read_only": True},
            "volume team of cluster.yaml is read-only; name a folder of another volume",
        ),
        (
            {"name": "disk", "host_path": "/data", "mount_path": "/mnt/team"},
            "volume disk of cluster.yaml is another folder on each node, and what is written there would not "
            "be found",
        ),
    ],
)
def test_checkpoints_need_a_shared_volume_that_can_be_written(volume, told):
    (said,) = problems(volume, **kept())
    assert said.startswith("checkpoints.folder: /mnt/team/runs: ")
    assert told in said
    assert said.endswith(
        "or leave the field out: checkpoints are then below the cluster's raw output location"
    )


def test_each_field_is_compared_with_the_pods_that_use_it(tmp_path):
    everywhere = {
        "model": {"name_or_path": "/mnt/team/llama"},
        "data": {
            "sources": [{"path": "/mnt/team/a.jsonl"}, {"path": "s3://b/c"}],
            "heldout_path": "/mnt/team/h.jsonl",
        },
        "method": {"name": "lora", "adapter": "/mnt/team/adapter"},
        "evaluation": {"include_path": "/mnt/team/tasks", "tasks": ["mine"], "shape": "t4-8"},
        "checkpoints": {"folder": "file:///mnt/team/runs"},
        "publish": {"address": "/mnt/team/models"},
    }
    assert problems(TEAM, **everywhere) == []
    keys = [said.partition(":")[0] for said in problems(**everywhere)]
    assert keys == [
        "model.name_or_path",
        "data.sources[0].path",
        "data.heldout_path",
        "method.adapter",
        "evaluation.include_path",
        "checkpoints.folder",
        "publish.address",
    ]
    # The pods of the evaluation's shape read the model and the tasks, and write no checkpoint.
    without = problems(TEAM | {"shapes": [SHAPE]}, **everywhere)
    assert [said.partition(":")[0] for said in without] == ["model.name_or_path", "evaluation.include_path"]
    assert "into the pods of t4-8; add t4-8 to its shapes" in without[0]
    # A read-only volume, and a disk of each node, are good enough for what is read.
    disk = {"name": "disk", "host_path": "/data", "mount_path": "/mnt/team", "read_only": True}
    assert [said.partition(":")[0] for said in problems(disk, **everywhere)] == [
        "checkpoints.folder",
        "publish.address",
    ]
    # Before the upload: local paths on no volume are uploaded, those on one stay.
    early = [said.partition(":")[0] for said in problems(uploaded=False, **everywhere)]
    assert early == ["checkpoints.folder", "publish.address"]
    assert len(problems(TEAM | {"shapes": ["h100-8"]}, uploaded=False, **everywhere)) == 4
    # Files of the light image itself.
    (tmp_path / "rows.jsonl").touch()
    assert problems(data={"path": str(tmp_path / "rows.jsonl")}) == []
    assert len(problems(model={"name_or_path": str(tmp_path)})) == 1


def test_the_planner_takes_a_shape_with_the_volume_and_refuses_where_there_is_none():
    recipe = recipe_of(method="lora", sharding="fsdp", hardware={"accelerator": "H100"}, **kept())
    assert planner.make(recipe, geometry=GEOMETRY).shape == "h100-8-spot"
    team = Cluster(volumes=[TEAM | {"shapes": ["h100-8"]}])
    assert planner.make(recipe, geometry=GEOMETRY, cluster=team).shape == "h100-8"
    with pytest.raises(
        RecipeError,
        match=r"(?s)folders of a cluster's pods: 1 mistake.*checkpoints.folder: /mnt/team/runs: no",
    ):
        planner.make(recipe, geometry=GEOMETRY, cluster=Cluster())


def test_the_plan_on_a_laptop_says_that_a_cluster_would_refuse(tmp_path, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("flytune.console.tables.console", lambda: Console(file=out, width=400))
    recipe = tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "rows.jsonl", 8))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 0
    assert (
        f"on a cluster this is refused: checkpoints.folder: {tmp_path}/checkpoints: no volume"
        in out.getvalue()
    )
