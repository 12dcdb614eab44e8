"""Builds the site: no warning, every page in the navigation, nothing fetched from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pages import DOCS, ROOT

_FETCHED = re.compile(r"""<(?:script|img|iframe)[^>]+src=["'](?:https?:)?//|<link[^>]+href=["'](?:https?:)?//""")


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert [page for page in pages if _FETCHED.search(page.read_text())] == []
    assert not list(tmp_path.rglob("*.py"))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if f"{page.name}" not in navigation]
    assert missing == []


def test_contributing_and_readme_fit_a_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
