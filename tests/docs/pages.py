"""Reads the Markdown pages: their code blocks in order, the marker before each, and their tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]

_BLOCK = re.compile(r"(?:<!-- test: (?P<marker>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    marker: str
    """What `<!-- test: ... -->` on the line before says: "parse", "add FLAGS", or nothing."""
    line: int

    def commands(self) -> list[str]:
        """Return the commands of a shell block, continuation lines joined, comments left out."""
        joined = self.text.replace("\\\n", " ")
        lines = [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    content = page.read_text()
    return [
        Block(found["language"], found["text"], found["marker"] or "", content.count("\n", 0, found.start("text")))
        for found in _BLOCK.finditer(content)
    ]


def table_keys(section: str) -> dict[str, str]:
    """Return the first two cells of each table row whose first cell is code: {key: second cell}."""
    rows = re.findall(r"^\| `([^`|]+)` \| ([^|]*) \|", section, re.M)
    return {key: second.strip() for key, second in rows}


def sections(page: Path, level: int) -> dict[str, str]:
    """Return what stands under each heading of a level, up to the next heading of that level or above."""
    parts = re.split(rf"^#{{{level}}} (.+)$", page.read_text(), flags=re.M)
    above = re.compile(rf"^#{{1,{level}}} ", re.M)
    return {name.strip().strip("`"): above.split(text)[0] for name, text in zip(parts[1::2], parts[2::2], strict=True)}
