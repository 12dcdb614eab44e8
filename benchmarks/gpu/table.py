"""Fills the table of gpu.md in one go: every row's script, with the settings that the page names.

    python benchmarks/gpu/table.py [--rows cartpole minatar solve warm-up learner] [--log FILE]

Most of its time is compiling. The warm-up is that of the first process after the compilers'
caches were emptied, and of a second one that finds them filled. Python's own bytecode lies ready for both, as after
any installation: some images come without it, and reading torch's sources anew takes 7 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDE = (
    "--network.channels [32] --network.dense 256 --actor.envs 512 --agent.minibatches 32 --optim.lr 0.0007"
    " --exploration.steps 1000000 --exploration.end 0.05 --evaluation.episodes 128 --evaluation.envs 128"
)
CARTPOLE = (
    "--actor.envs 1024 --agent.rollout_length 16 --agent.epochs 4 --agent.minibatches 4 --agent.q_lambda 0.9"
    " --agent.gamma 0.99 --optim.lr 0.002 --exploration.steps 200000 --exploration.end 0.05 --every 32768"
)
SOLVE = "--peer-rules --seeds 1 2 3 --limit 15 --every 500000"
BYTECODE = "import torch._inductor.compile_fx, torch._dynamo, triton.backends.nvidia.compiler, qfleet"
ROWS = {
    "warm-up": [
        "solve.py cartpole --seeds 101 --limit 1 " + CARTPOLE,
        "solve.py cartpole --seeds 101 --limit 1 " + CARTPOLE,
        f"solve.py breakout --peer-rules --seeds 1 --limit 0.5 --every 500000 {WIDE}",
        f"solve.py breakout --peer-rules --seeds 1 --limit 0.5 --every 500000 {WIDE}",
    ],
    "cartpole": [
        "fused.py --shipped --parts cartpole",
        "solve.py cartpole --seeds 101 102 103 104 105 --limit 5 " + CARTPOLE,
    ],
    "minatar": ["fused.py --shipped --parts minatar"],
    "solve": [
        f"solve.py breakout {SOLVE} --env_steps 12000000 {WIDE}",
        f"solve.py asterix {SOLVE} --env_steps 28000000 {WIDE} --optim.lr 0.001",
        f"solve.py space_invaders {SOLVE} --env_steps 12000000 {WIDE}",
    ],
    "learner": ["learner.py --seconds 80"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        caches["PYTHONPYCACHEPREFIX"] = f"{cache}/bytecode"
        subprocess.run([sys.executable, "-c", BYTECODE], env={**os.environ, **caches}, check=True)
        for command in (command for row in options.rows for command in ROWS[row]):
            script, *rest = command.split()
            began = time.monotonic()
            ran = subprocess.run(
                [sys.executable, HERE / script, *rest], env={**os.environ, **caches}, capture_output=True, text=True
            )
            text = f"$ {command}\n{ran.stdout}" + (ran.stderr[-2000:] if ran.returncode else "")
            text += f"  ({time.monotonic() - began:.0f} s)\n"
            print(text, flush=True)
            if options.log:
                with options.log.open("a") as log:
                    log.write(text)


if __name__ == "__main__":
    main()
