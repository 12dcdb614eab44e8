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
"$target/bin/python" -m pip install --quiet stable-baselines3==2.9.2 cpprb==11.0.0

"$target/bin/python" - <<'CHECK'
from importlib.metadata import version

import cpprb, gymnasium, stable_baselines3, torch  # noqa: E401, F401  (a peer that does not import is no peer)

print(", ".join(f"{name} {version(name)}" for name in ("torch", "stable-baselines3", "gymnasium", "cpprb", "numpy")))
CHECK
