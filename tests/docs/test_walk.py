"""Keeps docs/walk.md true: what it names exists, is passed by a real run, and comes in the order of the six files."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pages import DOCS, ROOT

SOURCE = ROOT / "src" / "qfleet"
ORDER = ["program.py", "actor.py", "replay_shard.py", "learner.py", "losses.py", "weight_store.py", "actor.py"]
_NAMED = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def named() -> list[tuple[str, str]]:
    """Return (file below src/qfleet, qualified name) of everything the page names, in its order."""
    return _NAMED.findall((DOCS / "walk.md").read_text())


def definitions(path: Path) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                found[prefix + child.name] = child
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return found


def test_everything_the_walk_names_exists() -> None:
    assert len(named()) > 15
    missing = [(file, name) for file, name in named() if name not in definitions(SOURCE / file)]
    assert missing == []


def test_the_walk_goes_through_the_six_files_in_order_and_back() -> None:
    headings = re.findall(r"^## \d+\. .*`[\w/]*?(\w+\.py)`", (DOCS / "walk.md").read_text(), re.M)
    assert headings == ORDER


def test_each_role_file_of_the_walk_says_what_it_receives_sends_and_waits_for() -> None:
    for file in {file for file, _ in named() if file.startswith("roles/")} - {"roles/recorder.py"}:
        opening = ast.get_docstring(ast.parse((SOURCE / file).read_text())) or ""
        assert re.search(r"Receives: .*\nSends: .*\n(.*\n)*?Waits for: ", opening + "\n"), file


def test_a_real_run_passes_every_function_of_the_walk(tmp_path: Path) -> None:
    import qfleet.api

    experiment = {
        "env_steps": 1200,
        "replay.sampler.kind": "prioritised",
        "evaluation.episodes": 1,
        "accel.kernels": "off",
    }
    experiment |= {"evaluation.test_episodes": 1, "accel.kernels": "off"}
    with calls() as passed:
        qfleet.api.train("gym:CartPole-v1", run_dir=tmp_path / "run", **experiment)
    functions = {
        (file, name) for file, name in named() if isinstance(definitions(SOURCE / file)[name], ast.FunctionDef)
    }
    assert functions - passed == set()


@contextmanager
def calls() -> Iterator[set[tuple[str, str]]]:
    """Collect (file below src/qfleet, qualified name) of every function of the package that is called."""
    passed: set[tuple[str, str]] = set()
    codes: set[object] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code not in codes:
            codes.add(frame.f_code)
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE):
                passed.add((str(path.relative_to(SOURCE)), frame.f_code.co_qualname))

    assert threading.current_thread() is threading.main_thread()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield passed
    finally:
        sys.setprofile(before)
