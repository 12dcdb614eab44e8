"""The recipes for clusters are well formed, name one version of Ray, and never start it without a token."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def cluster(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents(name)[0]["spec"]
    return spec.get("rayClusterSpec", spec)


def test_the_launchers_file_follows_rays_own_rules():
    pytest.importorskip("ray")
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(documents("launcher.yaml")[0]))


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_kubernetes_has_a_token_the_locked_ray_and_a_shared_folder_on_every_pod(name: str) -> None:
    spec = cluster(name)
    assert spec["authOptions"] == {"mode": "token"}
    assert f"ray=={spec['rayVersion']} " in (ROOT / "requirements.lock").read_text()
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        (container,) = pod["containers"]
        assert container["image"] == "qfleet"
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/shared", "/dev/shm"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_slurm_script_is_a_script_and_hides_its_token():
    script = DEPLOY / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    commands = [line for line in script.read_text().splitlines() if re.match(r"\s*(srun|ray|qfleet) ", line)]
    assert commands
    assert not any("TOKEN" in line for line in commands)


def kept(folder: Path, codes: str) -> tuple[int, list[str]]:
    """Run the keeper with a qfleet that only notes how it was called and ends with these codes, one after the other."""
    (folder / "bin").mkdir()
    fake = folder / "bin" / "qfleet"
    fake.write_text(
        f"""#!/usr/bin/env bash
echo "$@" >> {folder}/calls
mkdir -p {folder}/run && touch {folder}/run/config.yaml
codes=({codes})
exit "${{codes[$(($(wc -l < {folder}/calls) - 1))]}}"
"""
    )
    fake.chmod(0o755)
    path = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    command = [str(DEPLOY / "keep.sh"), str(folder / "run"), "cartpole", "--seed", "1"]
    ended = subprocess.run(command, env=path, stderr=subprocess.DEVNULL, timeout=60, check=False)
    return ended.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("codes", "code", "resumed"), [("0", 0, 0), ("137 3 0", 0, 2), ("2", 2, 0), ("1 130", 130, 1), ("3 4", 4, 1)]
)
def test_the_keeper_resumes_whatever_died_and_nothing_else(codes: str, code: int, resumed: int, tmp_path: Path) -> None:
    ended, calls = kept(tmp_path, codes)
    assert ended == code
    first = f"train cartpole --seed 1 --run-dir {tmp_path}/run"
    assert calls == [first] + [f"resume {tmp_path}/run"] * resumed


def test_every_way_to_start_ray_has_a_token():
    for path in DEPLOY.iterdir():
        text = path.read_text()
        assert "token" in text.lower(), path
        for line in text.splitlines():
            if re.search(r"ray start .*--(head|address)", line):
                assert "RAY_AUTH_MODE=token" in line, line


def test_the_launcher_takes_the_token_to_every_machine_as_a_file_that_no_command_names():
    """A variable of the one who launches would be empty there."""
    assert documents("launcher.yaml")[0]["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert "$RAY_AUTH_TOKEN" not in (DEPLOY / "launcher.yaml").read_text()
