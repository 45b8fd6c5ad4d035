"""Artifacts of a few files, about which a person is asked."""

from flytune.records.contents import seal
from tests.support.plans import recipe_of


def write_artifact(folder, weights=b"weights", **changes):
    """Write an artifact of a few files; return its address."""
    folder.mkdir(parents=True)
    publish = {"address": str(folder.parent / "store"), "approval": {"hours": 72}}
    (folder / "recipe.yaml").write_text(recipe_of(publish=publish, **changes).to_yaml())
    (folder / "report.html").write_text("<html><body class='flytune'><p>losses</p></body></html>")
    (folder / "model.safetensors").write_bytes(weights)
    seal(folder, "artifact")
    return str(folder)
