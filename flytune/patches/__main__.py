"""Command that prints the table of replaced names, or writes it into a page: `python -m flytune.patches
[docs/patches.md]`."""

import sys
from pathlib import Path

from flytune.patches import table

MARK = "<!-- made by `python -m flytune.patches docs/patches.md` -->\n"


def main(arguments: list[str]) -> None:
    """Print the table, or put it after the mark of the page that is named."""
    if not arguments:
        sys.stdout.write(table.markdown())
        return
    page = Path(arguments[0])
    head, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{page}: has no line {MARK.strip()}, after which the table is written; add it")
    page.write_text(f"{head}{mark}\n{table.markdown()}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
