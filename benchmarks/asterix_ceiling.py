"""How much gold MinAtar's Asterix offers in an episode of 1,000 steps: what a player would score who took each piece
the moment it appears and met no enemy.

    python benchmarks/asterix_ceiling.py [--games 2000] [--steps 1000]
"""

from __future__ import annotations

import argparse

import torch

from qfleet.envs.tensor.games import make_game


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    game, generator = make_game("minatar-asterix", sticky=0.0), torch.Generator().manual_seed(1)
    state = game.start(torch.rand(options.games, game.draws, generator=generator))
    stay, gold = torch.zeros(options.games, dtype=torch.int64), torch.zeros(options.games)
    for _ in range(options.steps):
        state, reward, _ = game.move(state, stay, torch.rand(options.games, game.draws, generator=generator))
        taken = state["things"].abs() == 2
        gold += taken.sum(1) + reward
        state["things"] = state["things"].masked_fill(taken, 0)
    print(f"gold offered in {options.steps} steps: mean {gold.mean():.1f}, deviation {gold.std():.1f}")


if __name__ == "__main__":
    main()
