#!/usr/bin/env bash
# Makes the environment in which the peers run, apart from the project's own.
#
# usage: benchmarks/peers/setup.sh [TARGET]      TARGET defaults to .peers/ in the repository, and ignores itself in git
#        PYTHON=python3.11 chooses the interpreter
set -euo pipefail

repository="$(cd "$(dirname "$0")/../.." && pwd)"
target="${1:-$repository/.peers}"
python="${PYTHON:-python3}"

if [ ! -x "$target/bin/python" ]; then
    "$python" -m venv "$target"
    echo '*' > "$target/.gitignore"
fi

# torch goes first and by exact version, so that no later requirement chooses another build of it.
"$target/bin/python" -m pip install --quiet torch==2.13.0
"$target/bin/python" -m pip install --quiet stable-baselines3==2.9.2 cpprb==11.0.0 \
    ale-py==0.12.1 opencv-python-headless==5.0.0.93 'ray[rllib]==2.60.0'

"$target/bin/python" - <<'CHECK'
from importlib.metadata import version

# a peer that does not import is no peer
import ale_py, cpprb, cv2, gymnasium, ray.rllib, stable_baselines3, torch  # noqa: E401, F401

names = ("torch", "stable-baselines3", "ray", "gymnasium", "cpprb", "ale-py", "numpy")
print(", ".join(f"{name} {version(name)}" for name in names))
CHECK
