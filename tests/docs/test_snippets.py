"""Runs what the README and the documentation tell a reader to type, page by page and in order.

Python blocks of a page share a namespace and a temporary directory with its shell blocks. `qfleet` commands run through
the same `main` as the installed command (the wheel's test runs the real one). Markers before a block:
`<!-- test: add FLAGS -->` appends flags, to make a run short; `<!-- test: parse -->` stops a command where the run, the
evaluation, the resume or a simulation would begin, so that only its words are checked.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pages import DOCS, PAGES, ROOT, Block, blocks

LANGUAGES = {"python", "sh", "text", "yaml", "json"}


class Reached(BaseException):
    """The command was understood and would have begun its work; not an Exception, so that nothing catches it."""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("workplace")
def test_every_snippet_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": f"snippets_of_{page.stem}"}
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        assert block.language in LANGUAGES, f"{where}: a block without a language is not checked by anything"
        if block.language == "python":
            exec(compile(block.text, where, "exec"), namespace)
        elif block.language == "sh":
            for command in block.commands():
                _run(command, block, where, capsys)


def _run(command: str, block: Block, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(command)
    check: Callable[[list[str]], None] | None = {"make": _check_make, "pip": _check_pip}.get(program)
    if check is not None:
        check(words)
        return
    assert program == "qfleet", f"{where}: nothing checks '{program}'"
    if block.marker.startswith("add "):
        words += shlex.split(block.marker.removeprefix("add "))
    if block.marker == "parse":
        _parse(words, where)
        return
    from qfleet.cli.main import main

    code = main(words)
    said = capsys.readouterr()
    assert code == 0, f"{where}: '{command}' ended with {code}: {said.err}"


def _parse(words: list[str], where: str) -> None:
    from qfleet import api
    from qfleet.cli.main import main

    def reached(*args: object, **kwargs: object) -> NoReturn:
        raise Reached

    with pytest.MonkeyPatch.context() as patch:
        for name in ("train", "resume", "evaluate", "plan_learners"):
            patch.setattr(api, name, reached)
        try:
            code = main(words)
        except Reached:
            return
    pytest.fail(f"{where}: {words} ended with {code} before its work began")


def _check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(words) <= targets


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        if found := re.fullmatch(r"(?:qfleet|\.)(?:\[([\w,]+)\])?", word):
            assert set(filter(None, (found[1] or "").split(","))) <= set(extras)


def test_the_readme_begins_with_the_two_commands() -> None:
    first = blocks(ROOT / "README.md")[0]
    assert first.commands() == ["make train", "make test"]


def test_the_algorithms_of_the_docs_are_all_of_them() -> None:
    from qfleet.presets.algorithms import ALGORITHMS

    algorithms = (DOCS / "algorithms.md").read_text()
    named = set(re.findall(r"`--algo (\w+)`", algorithms))
    assert named == set(ALGORITHMS)


def test_the_presets_of_the_quickstart_are_all_of_them_with_their_targets() -> None:
    from qfleet.presets.registry import PREFIXES, PRESETS

    rows = dict(re.findall(r"^\| `([\w:-]+)` \| (.*) \|$", (DOCS / "quickstart.md").read_text(), re.M))
    assert set(rows) == {*PRESETS, *(f"{prefix}:{what}" for prefix, (what, _) in PREFIXES.items()), "module:function"}
    for name, build in PRESETS.items():
        if target := re.search(r"target (-?\d+)", rows[name]):
            assert build().evaluation.target == float(target[1])


def test_tests_named_in_the_docs_exist() -> None:
    named = [(page.name, name) for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())]
    assert named
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    assert [(page, name) for page, name in named if name not in defined] == []


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_repository_files_named_in_the_docs_exist() -> None:
    pattern = re.compile(r"`((?:src|tests|docs|examples|benchmarks|\.ci)/[\w./-]+)`")
    missing = [
        (page.name, path) for page in PAGES for path in pattern.findall(page.read_text()) if not (ROOT / path).exists()
    ]
    assert missing == []
