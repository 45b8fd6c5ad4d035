"""Table of all replaced names, which docs/patches.md has."""

from collections.abc import Iterator
from types import ModuleType

from flytune import patches
from flytune.patches.record import Patch

_LASTS = {"process": "until the process ends", "block": "within a block", "object": "on single objects"}


def records() -> Iterator[tuple[str, Patch]]:
    """Yield all records, each with its place in the code: "trl.LOSS_TILE",
    "trl.FUSED_HEADS[trl.trainer.sft_trainer]"."""
    for library in patches.__all__:
        module: ModuleType = getattr(patches, library)
        for name, value in vars(module).items():
            if isinstance(value, Patch):
                yield f"{library}.{name}", value
            elif isinstance(value, dict) and not name.startswith("__"):
                yield from (
                    (f"{library}.{name}[{key}]", patch)
                    for key, patch in value.items()
                    if isinstance(patch, Patch)
                )


def markdown() -> str:
    """Return the table in Markdown, with a heading for each library."""
    lines: list[str] = []
    for library in patches.__all__:
        mine = [record for key, record in records() if key.partition(".")[0] == library]
        versions = ", ".join(dict.fromkeys(record.version for record in mine))
        lines += [
            f"## {library} {versions}",
            "",
            "| name | replaced | why | upstream | remove when |",
            "|---|---|---|---|---|",
        ]
        for record in mine:
            upstream = "<br>".join(f"`{place}`" for place in record.upstream)
            cells = [f"`{record.name}`", _LASTS[record.lasts], record.reason, upstream, record.remove_when]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
