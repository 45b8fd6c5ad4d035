"""lineage.json: the runs whose model another run started from."""

from flytune.schema import Record, Strict, omitted

LINEAGE = "lineage.json"


class Ancestor(Strict):
    """One run, as its artifact records it."""

    name: str
    """The recipe's name."""
    objective: str
    method: str
    base: str
    """The recipe's model.name_or_path."""
    revision: str | None
    """Commit of that base; None for a folder or an address."""
    teacher: str | None = omitted(None)
    """Name of the model whose distributions it trained; None of other objectives than distill."""
    teacher_revision: str | None = omitted(None)
    """Commit of that model; None for a folder or an address."""
    data_sha256: str
    """Manifest.content_sha256 of its prepared data."""
    artifact_sha256: str
    """Hash of its artifact.json, which lists the hash of every file."""
    recipe: str
    """Content of its recipe.yaml."""


class Lineage(Record):
    """lineage.json: the runs before this one, the first run first; each trained the model that the previous
    one made."""

    runs: list[Ancestor]
