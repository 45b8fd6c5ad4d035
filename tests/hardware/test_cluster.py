import pytest

from flytune.errors import RecipeError
from flytune.hardware import load_cluster


def test_the_shipped_cluster_asks_for_no_secret_and_no_queue():
    cluster = load_cluster()
    assert cluster.gang_scheduling == "none"
    assert not any((cluster.secrets.hub, cluster.secrets.tracking, cluster.secrets.notify))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gang_schedulin: kueue", "gang_schedulin: unknown key; did you mean gang_scheduling?"),
        ("gang_scheduling: kueue", "needs queue: the name of a local queue"),
        ("secrets: {hub: [{env_var: hf token, key: a}]}", r"secrets.hub\[0\].env_var: must be capital letters"),
    ],
)
def test_mistakes_are_told(tmp_path, text, told):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=told):
        load_cluster(file)


def test_an_empty_file_is_a_cluster(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("# nothing\n")
    assert load_cluster(file).zone_label == "topology.kubernetes.io/zone"
