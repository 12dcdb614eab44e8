"""The house stays in order: who may name what, what an import loads, what each file says of itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "qfleet"
FILES = sorted(SOURCE.rglob("*.py"))
OPTIONAL = (
    "ray",
    "numba",
    "triton",
    "ale_py",
    "envpool",
    "PIL",
    "pygame",
    "matplotlib",
    "prometheus_client",
    "tensorboard",
    "wandb",
    "optuna",
    "Box2D",
)


def imported(path: Path) -> set[str]:
    """Top-level packages that a file names anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


PARTS = (
    "", "_calls", "_cluster", "_head", "_keeper", "_keepers", "_life", "_roaming", "_stewards", "_watch",
)  # fmt: skip
RAY = [f"runtime/ray{part}.py" for part in PARTS]


def test_ray_is_named_in_the_files_of_its_placement():
    assert [str(f.relative_to(SOURCE)) for f in FILES if "ray" in imported(f)] == RAY


def test_multiprocessing_is_named_in_two_files():
    users = {str(f.relative_to(SOURCE)) for f in FILES if "multiprocessing" in imported(f)}
    assert users == {"runtime/child.py", "runtime/children.py"}


def test_tyro_and_rich_are_named_in_the_command_line_only():
    users = {f.relative_to(SOURCE).parts[0] for f in FILES if imported(f) & {"tyro", "rich"}}
    assert users <= {"cli"}


def test_nothing_a_user_passes_is_unpickled():
    """Pickle moves our own classes between our own processes; no other file names it, and torch.load is never used."""
    users = {str(f.relative_to(SOURCE)) for f in FILES if imported(f) & {"pickle", "cloudpickle", "dill", "joblib"}}
    assert users <= {"runtime/child.py", "runtime/processes.py", *RAY, "envs/nursery.py"}
    dangerous = re.compile(r"(?<!safetensors\.)torch\.(load|save)\(|allow_pickle=True|yaml\.(unsafe_)?load\(")
    assert not [f for f in FILES if dangerous.search(f.read_text())]


READERS = {
    "cli/logs.py": "to find lines of the last minutes",
    "cli/status.py": "to say how long ago something was",
    "control/monitor.py": "the time of an event, for people",
    "control/progress.py": "the time of a record, for people",
    "observe/prometheus.py": "when a record was made",
    "runtime/ownership.py": "for people, and a guess at silence that watching makes sure of",
    "runtime/ray_cluster.py": "to say how long a node is still there",
    "session.py": "the time of an event before there is a monitor, for people",
}


def test_the_wall_clock_is_read_for_people_and_decides_nothing():
    reads = re.compile(r"time\.time\(|time\.time_ns\(|st_mtime|datetime\.(now|utcnow|today)\(|CLOCK_REALTIME")
    readers = {str(path.relative_to(SOURCE)) for path in FILES if reads.search(path.read_text())}
    assert readers == set(READERS), "clocks jump: deadlines, orders and leases go by time.monotonic()"


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_training_loads_no_optional_dependency():
    code = f"import sys, qfleet.api; print([m for m in {OPTIONAL!r} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_import_qfleet_loads_not_even_torch():
    assert run_python("import sys, qfleet; print('torch' in sys.modules)").strip() == "False"


def test_public_names_exist():
    import qfleet

    assert all(hasattr(qfleet, name) for name in qfleet.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_file_says_what_it_is_for(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc
    assert len(doc.splitlines()[0]) <= 130


@pytest.mark.parametrize("name", ["actor", "replay_shard", "learner", "weight_store", "evaluator", "inference_server"])
def test_role_files_open_with_what_they_receive_send_and_wait_for(name):
    doc = ast.get_docstring(ast.parse((SOURCE / "roles" / f"{name}.py").read_text())) or ""
    assert all(line in doc for line in ("Receives: ", "Sends: ", "Waits for: "))


def test_each_trap_has_a_test():
    """DESIGN's list of mistakes that have bitten well-known libraries; 3, 12, 16 and 19 are told by their words."""
    text = "\n".join(p.read_text() for p in Path(__file__).parents[1].rglob("test_*.py"))
    named = {
        int(n) for group in re.findall(r"def test_traps?_((?:\d+_(?:and_)?)+)", text) for n in re.findall(r"\d+", group)
    }
    assert set(range(1, 20)) <= named, f"no test is named after trap {sorted(set(range(1, 20)) - named)}"
