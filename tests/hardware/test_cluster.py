"""Contents of cluster.yaml, and the pods that mount its volumes."""

import re

import pytest
import yaml

from flytune.errors import RecipeError
from flytune.hardware import Cluster, load_cluster
from flytune.hardware.cluster import CLUSTER_FILE
from flytune.hardware.volumes import SOURCES

CLAIM = {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"}
HOST = {"name": "disk", "host_path": "/data", "mount_path": "/mnt/disk"}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"gang_schedulin": "kueue"}, "gang_schedulin: unknown key; did you mean gang_scheduling?"),
        ({"gang_scheduling": "kueue"}, "needs queue: the name of a local queue"),
        (
            {"secrets": {"hub": [{"env_var": "hf token", "key": "a"}]}},
            r"secrets.hub\[0\].env_var: must be capital letters",
        ),
        (
            [{"name": "a", "mount_path": "/mnt/a"}],
            "volume a needs exactly one of persistent_volume_claim, csi, nfs, host_path",
        ),
        ([CLAIM | {"host_path": "/x"}], "it has persistent_volume_claim and host_path"),
        ([CLAIM | {"mount_path": "mnt"}], "mnt: write an absolute path, for example /mnt/checkpoints"),
        ([CLAIM | {"mount_path": "/mnt/../etc"}], "write an absolute path"),
        ([CLAIM | {"mount_path": "/"}], "it would hide files that pods need there"),
        ([CLAIM | {"mount_path": "/app/"}], "/app/: it would hide files"),
        ([CLAIM | {"mount_path": "/scratch/hub"}], "it would hide files"),
        ([CLAIM | {"name": "scratch"}], "scratch: pods have a volume of this name"),
        ([CLAIM | {"name": "My_Disk"}], r"volumes\[0\].name: must be 1 to 63 lower-case letters"),
        ([CLAIM | {"persistent_volume_clam": "x"}], "did you mean persistent_volume_claim?"),
        ([CLAIM | {"total_read_gbs": 2}], "add read_gbs"),
        (
            [CLAIM, CLAIM | {"mount_path": "/mnt/b"}],
            "team and team have the same name, team; give each its own$",
        ),
        (
            [CLAIM, CLAIM | {"name": "b"}],
            "the same mount_path, /mnt/team; give each its own, or other shapes and light_tasks",
        ),
        (
            [CLAIM | {"shapes": ["cpu-1"]}, CLAIM | {"name": "b", "shapes": ["cpu-2"]}],
            "same mount_path",
        ),  # both in light pods
    ],
)
def test_mistakes_are_reported_with_what_to_do(tmp_path, rows, told):
    (tmp_path / "cluster.yaml").write_text(
        yaml.safe_dump(rows if isinstance(rows, dict) else {"volumes": rows})
    )
    with pytest.raises(RecipeError, match=told):
        load_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            CLAIM | {"mount_path": "/mnt/other"},
            "no volume of the light tasks' pods is mounted there; name a folder below",
        ),
        (CLAIM | {"light_tasks": False}, "no volume of the light tasks' pods is mounted there"),
        (CLAIM | {"shapes": ["cpu-1"]}, "volume team is mounted into some shapes' pods only"),
        (HOST | {"mount_path": "/mnt/team"}, "volume disk is another folder on each node"),
    ],
)
def test_the_model_cache_is_on_a_volume_of_all_pods(tmp_path, row, told):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"volumes": [row], "model_cache": "/mnt/team/hub"}))
    with pytest.raises(RecipeError, match=f"model_cache: /mnt/team/hub: {told}"):
        load_cluster(tmp_path / "cluster.yaml")
    assert Cluster(volumes=[CLAIM], model_cache="/mnt/team/hub").model_cache == "/mnt/team/hub"


def test_the_same_path_may_be_another_volume_in_other_pods():
    rows = [CLAIM | {"shapes": ["cpu-1"]}, CLAIM | {"name": "b", "shapes": ["cpu-2"], "light_tasks": False}]
    cluster = Cluster(volumes=rows)
    found = [cluster.volume_at("/mnt/team/x", shape) for shape in ("cpu-1", "cpu-2", "t4-8", None)]
    assert [volume and volume.name for volume in found] == ["team", "b", None, "team"]


@pytest.mark.parametrize("written", [None, ["/mnt/models"]])
def test_the_old_key_names_what_to_write(written):
    with pytest.raises(
        ValueError, match=r"mounted: replaced by volumes.*write volumes: \[\{name: models, "
    ) as caught:
        Cluster(mounted=written)
    suggested = re.search(r"write (volumes: \[.*?\])", str(caught.value))
    (volume,) = Cluster.model_validate(yaml.safe_load(suggested[1])).volumes
    assert volume.mount_path == "/mnt/models"


def test_a_path_is_on_the_volume_with_the_longest_mount_path():
    cluster = Cluster(volumes=[CLAIM | {"mount_path": "/mnt"}, HOST])
    named = {
        path: cluster.volume_at(path, "cpu-1")
        for path in ("/mnt/disk/x", "/mnt/diskx", "/mnt/disk/../x", "/mn")
    }
    assert [volume and volume.name for volume in named.values()] == ["disk", "team", "team", None]
    assert cluster.has_mounted("/mnt/a")
    assert not cluster.has_mounted("/srv")


def test_a_host_path_is_a_folder_of_each_node_unless_the_file_says_otherwise():
    cluster = Cluster(
        volumes=[CLAIM, HOST, HOST | {"name": "lustre", "mount_path": "/mnt/lustre", "shared": True}]
    )
    assert [volume.is_shared for volume in cluster.volumes] == [True, False, True]


def test_shapes_that_do_not_exist_are_named():
    with pytest.raises(
        RecipeError, match=r"volumes: team: shapes: no row h100 in shapes.yaml; there are cpu-1, t4-1"
    ):
        Cluster(volumes=[CLAIM | {"shapes": ["h100", "t4-1"]}]).check_shapes({"t4-1", "cpu-1"})


def test_an_empty_file_is_a_cluster(tmp_path):
    (tmp_path / "cluster.yaml").write_text("# nothing\n")
    assert load_cluster(tmp_path / "cluster.yaml").zone_label == "topology.kubernetes.io/zone"


def test_the_shipped_file_asks_for_nothing_and_its_examples_are_valid():
    text, cluster = CLUSTER_FILE.read_text(encoding="utf-8"), load_cluster()
    assert cluster.gang_scheduling == "none"
    assert not any((cluster.volumes, cluster.secrets.hub, cluster.secrets.tracking, cluster.secrets.notify))
    example = re.search(r"^# volumes:\n((?:# - .*\n)+)", text, re.MULTILINE)
    rows = yaml.safe_load(re.sub("^# ", "", "# volumes:\n" + example[1], flags=re.MULTILINE))["volumes"]
    assert {key for row in rows for key in row if key in SOURCES} == set(SOURCES)
    assert len(Cluster(volumes=rows).volumes) == len(rows)
