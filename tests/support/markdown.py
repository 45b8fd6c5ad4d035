"""Links, code and headings of the repository's Markdown files."""

import re
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.sources import tracked

FENCE = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|!?\[[^\[\]]*\]\([^()]*\))*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)"
)
TAG = re.compile(r"<(?:img|a|source)\b[^>]*>")
ATTRIBUTE = re.compile(r"\b(src|srcset|href|alt)=\"([^\"]*)\"")


def pages() -> list[Path]:
    """List the Markdown files of the repository, without those stored by earlier releases, which are never
    edited."""
    names = tracked("--cached", "--others", "--exclude-standard", "--deduplicate", "*.md")
    return [ROOT / name for name in sorted(names) if not name.startswith("tests/support/releases/")]


def without_code(text: str) -> str:
    """Return the text without fenced blocks and code spans."""
    return SPAN.sub("", FENCE.sub("", text))


def links(text: str) -> list[tuple[str, bool, str]]:
    """List the links and images as (target, whether it is an image, text or alternative text)."""
    text = without_code(text)
    links = []
    for mark, label, target in LINK.findall(text):
        links.append((target, mark == "!", label))
        links += [(inner[2], True, inner[1]) for inner in LINK.findall(label)]
    for tag in TAG.findall(text):
        values = dict(ATTRIBUTE.findall(tag))
        target = values.get("src") or values.get("srcset") or values.get("href", "")
        links.append(
            (target, tag.startswith("<img"), values.get("alt", "") if tag.startswith("<img") else "-")
        )
    return links


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings."""
    seen: dict[str, int] = {}
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", FENCE.sub("", text), re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(slug if slug not in seen else f"{slug}-{seen[slug]}")
        seen[slug] = seen.get(slug, 0) + 1
    return found


def code(text: str) -> list[str]:
    """List the code spans and fenced blocks."""
    return [block[0] for block in FENCE.finditer(text)] + [
        span for _, span in SPAN.findall(FENCE.sub("", text))
    ]
