"""Searches settings of the cartpole preset: trains thousands of small DQN agents side by side on one GPU.

    python benchmarks/tuning/cartpole_population.py --configs 256 --seeds 8 --rounds 3 --out FILE

Every agent has its own network, replay, environments and settings; one batched matrix product serves all of them. The
algorithm is the preset's (n-step Double DQN, soft target, the target network evaluated); the score of a setting is the
environment steps to the third evaluation in a row (20 episodes, every 1,000 steps) at 475, over seeds. After each round
the best settings have children. The winner is checked with qfleet itself, on other seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

SCALE = (1 / 2.4, 1 / 2, 1 / 0.21, 1 / 2)
CHOICES = {
    "lr": [3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3],
    "lr_end": [0.05, 0.1, 0.2, 0.5, 1.0],
    "lr_updates": [1000, 2000, 3000, 5000, 8000],
    "reward_scale": [0.002, 0.005, 0.01, 0.02, 0.05, 0.1],
    "tau": [0.005, 0.01, 0.02, 0.03, 0.05, 0.1],
    "gamma": [0.97, 0.98, 0.985, 0.99, 0.995],
    "n_step": [1, 2, 3, 4, 5],
    "epsilon_end": [0.0, 0.02, 0.05, 0.1, 0.2],
    "epsilon_steps": [500, 1000, 2000, 4000],
    "max_grad_norm": [0.5, 1.0, 10.0, 1000.0],
    "double": [0.0, 1.0],
    "adam_eps": [1e-8, 1e-5, 1e-4],
    "beta2": [0.99, 0.999],
    "starts": [250, 500, 1000],
}
STEPS_MAX = 5


class CartPole:
    """Gymnasium's CartPole-v1 for a batch of any shape, with a reset in the same step."""

    def __init__(self, shape: tuple[int, ...], generator: torch.Generator) -> None:
        self.generator, self.device = generator, generator.device
        self.state = self._fresh((*shape, 4))
        self.age = torch.zeros(shape, device=self.device)

    def _fresh(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) * 0.1 - 0.05

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (observation after the action, terminated, truncated); `state` is already reset where it ended."""
        x, v, angle, spin = self.state.unbind(-1)
        force = torch.where(action == 1, 10.0, -10.0)
        cos, sin = angle.cos(), angle.sin()
        push = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        drive = push - 0.05 * turn * cos / 1.1
        after = torch.stack([x + 0.02 * v, v + 0.02 * drive, angle + 0.02 * spin, spin + 0.02 * turn], -1)
        self.age += 1
        terminated = (after[..., 0].abs() > 2.4) | (after[..., 2].abs() > 12 * 2 * math.pi / 360)
        truncated = (self.age >= 500) & ~terminated
        ended = terminated | truncated
        self.state = torch.where(ended[..., None], self._fresh(after.shape), after)
        self.age = torch.where(ended, 0.0, self.age)
        return after, terminated, truncated


class Networks:
    """N multilayer perceptrons 4-H-H-2 as batched matrices, initialised as torch.nn.Linear does."""

    def __init__(self, count: int, hidden: int, generator: torch.Generator) -> None:
        sizes = [(4, hidden), (hidden, hidden), (hidden, 2)]
        self.values = []
        for inputs, outputs in sizes:
            bound = 1 / math.sqrt(inputs)
            for shape in ((count, inputs, outputs), (count, 1, outputs)):
                drawn = torch.rand(shape, generator=generator, device=generator.device)
                self.values.append((2 * drawn - 1) * bound)

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        """Map [N, B, 4] to [N, B, 2]."""
        scale = torch.tensor(SCALE, device=observation.device)
        w1, b1, w2, b2, w3, b3 = self.values
        h = torch.relu(torch.baddbmm(b1, observation * scale, w1))
        return torch.baddbmm(b3, torch.relu(torch.baddbmm(b2, h, w2)), w3)


class Population:
    """N agents with settings of their own: tensors [N] by name."""

    def __init__(self, settings: dict[str, torch.Tensor], args: argparse.Namespace) -> None:
        self.settings, self.args = settings, args
        self.count = len(settings["lr"])
        self.device = settings["lr"].device
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.online = Networks(self.count, args.hidden, self.generator)
        self.target = Networks(self.count, args.hidden, self.generator)
        self.target.values = [value.clone() for value in self.online.values]
        self.moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in self.online.values]
        self.envs = CartPole((self.count, args.envs), self.generator)
        ticks, shape = args.steps // args.envs + 1, (self.count, args.envs)
        self.seen = torch.zeros(ticks, *shape, 4, device=self.device)
        self.after = torch.zeros(ticks, *shape, 4, device=self.device)
        self.action = torch.zeros(ticks, *shape, dtype=torch.int64, device=self.device)
        self.terminated = torch.zeros(ticks, *shape, dtype=torch.bool, device=self.device)
        self.ended = torch.zeros(ticks, *shape, dtype=torch.bool, device=self.device)
        self.tick, self.updates = 0, 0

    def act(self) -> None:
        """Take one step in every environment of every agent."""
        s, steps = self.settings, self.tick * self.args.envs
        epsilon = 1 + (s["epsilon_end"] - 1) * (steps / s["epsilon_steps"]).clamp(max=1)
        seen = self.envs.state
        greedy = self.online(seen).argmax(-1)
        coin = torch.rand(greedy.shape, generator=self.generator, device=self.device) < epsilon[:, None]
        chance = torch.randint(2, greedy.shape, generator=self.generator, device=self.device)
        action = torch.where(coin, chance, greedy)
        after, terminated, truncated = self.envs.step(action)
        t = self.tick
        self.seen[t], self.after[t], self.action[t] = seen, after, action
        self.terminated[t], self.ended[t] = terminated, terminated | truncated
        self.tick += 1

    def sample(self) -> tuple[torch.Tensor, ...]:
        """Return (seen, action, n-step return of rewards 1, discount, after) of a batch for every agent."""
        shape = (self.count, self.args.batch)
        # Windows that would reach beyond the newest tick are cut there, which is what an unfinished n-step return is.
        t = torch.randint(self.tick, shape, generator=self.generator, device=self.device)
        e = torch.randint(self.args.envs, shape, generator=self.generator, device=self.device)
        n = torch.arange(self.count, device=self.device)[:, None].expand(shape)
        gamma, limit = self.settings["gamma"][:, None], self.settings["n_step"][:, None]
        total, factor = torch.zeros(shape, device=self.device), torch.ones(shape, device=self.device)
        last, alive = t.clone(), torch.ones(shape, dtype=torch.bool, device=self.device)
        for k in range(STEPS_MAX):
            now = (t + k).clamp(max=self.tick - 1)
            alive = alive & (k < limit) & (t + k < self.tick)
            total = total + torch.where(alive, factor, 0.0)
            factor = torch.where(alive, factor * gamma, factor)
            last = torch.where(alive, now, last)
            alive = alive & ~self.ended[now, n, e]
        discount = torch.where(self.terminated[last, n, e], 0.0, factor)
        return self.seen[t, n, e], self.action[t, n, e], total, discount, self.after[last, n, e]

    def update(self) -> None:
        """Make one gradient step for every agent that has enough experience."""
        s = self.settings
        seen, action, total, discount, after = self.sample()
        with torch.no_grad():
            target_q = self.target(after)
            chooser = torch.where(s["double"][:, None, None] > 0, self.online(after), target_q)
            value = target_q.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
            goal = total * s["reward_scale"][:, None] + discount * value
        for parameter in self.online.values:
            parameter.requires_grad_(True)
        q = self.online(seen).gather(-1, action[..., None]).squeeze(-1)
        loss = torch.nn.functional.huber_loss(q, goal, reduction="sum") / self.args.batch
        gradients = torch.autograd.grad(loss, self.online.values)
        for parameter in self.online.values:
            parameter.requires_grad_(False)
        self.step(gradients)

    @torch.no_grad()
    def step(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Clip each agent's gradient and apply Adam and the soft target, each with the agent's settings."""
        s = {name: value[:, None, None] for name, value in self.settings.items()}
        norm = torch.sqrt(sum(g.square().sum((1, 2), keepdim=True) for g in gradients))
        clip = (s["max_grad_norm"] / (norm + 1e-6)).clamp(max=1)
        active = (self.tick * self.args.envs >= s["starts"]).float()
        self.updates += 1
        rate = s["lr"] * (1 + (s["lr_end"] - 1) * (self.updates / s["lr_updates"]).clamp(max=1)) * active
        for gradient, value, (first, second), target in zip(
            gradients, self.online.values, self.moments, self.target.values, strict=True
        ):
            gradient = gradient * clip
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(s["beta2"]).addcmul_(gradient.square(), 1 - s["beta2"])
            unbiased = first / (1 - 0.9**self.updates)
            value -= rate * unbiased / ((second / (1 - s["beta2"] ** self.updates)).sqrt() + s["adam_eps"])
            target += s["tau"] * (value - target)

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        """Return the mean return [N] of 20 episodes with the target networks."""
        env = CartPole((self.count, 20), self.generator)
        alive = torch.ones(self.count, 20, dtype=torch.bool, device=self.device)
        score = torch.zeros(self.count, 20, device=self.device)
        for tick in range(500):
            _, terminated, truncated = env.step(self.target(env.state).argmax(-1))
            score += alive
            alive &= ~(terminated | truncated)
            if tick % 50 == 49 and not alive.any():
                break
        return score.mean(-1)


def steps_to_target(settings: dict[str, torch.Tensor], args: argparse.Namespace) -> torch.Tensor:
    """Train one population; return the steps [N] to the third evaluation in a row, infinite where there was none."""
    population = Population(settings, args)
    in_a_row = torch.zeros(population.count, device=population.device)
    solved = torch.full((population.count,), math.inf, device=population.device)
    owed, evaluated = 0.0, 0
    while population.tick * args.envs < args.steps:
        population.act()
        steps = population.tick * args.envs
        owed += args.envs / args.train_period if steps >= min(CHOICES["starts"]) else 0
        while owed >= 1:
            population.update()
            owed -= 1
        if steps // 1000 > evaluated:
            evaluated = steps // 1000
            good = population.evaluate() >= 475
            in_a_row = torch.where(good, in_a_row + 1, 0.0)
            solved = torch.where((in_a_row >= 3) & solved.isinf(), float(steps), solved)
    return solved


def ranked(configs: list[dict[str, float]], solved: torch.Tensor) -> list[dict[str, object]]:
    """Return settings with their steps over seeds, best mean first; an unsolved seed counts four times the slowest."""
    rows = []
    cap = float(solved[~solved.isinf()].max()) if (~solved.isinf()).any() else 1.0
    for config, steps in zip(configs, solved.tolist(), strict=True):
        finite = sorted(s for s in steps if s != math.inf)
        cost = sum(s if s != math.inf else 4 * cap for s in steps) / len(steps)
        rows.append(
            {
                "cost": cost,
                "solved": len(finite),
                "of": len(steps),
                "median": sorted(steps)[len(steps) // 2],
                "config": config,
            }
        )
    return sorted(rows, key=lambda row: float(row["cost"]))  # type: ignore[arg-type]


def children(parents: list[dict[str, float]], count: int, draw: torch.Generator) -> list[dict[str, float]]:
    """Return settings of which each takes its values from two parents, and some anew."""

    def pick(values: list[float]) -> float:
        return values[int(torch.randint(len(values), (), generator=draw))]

    made = []
    for _ in range(count):
        mother, father = pick(parents), pick(parents)  # type: ignore[arg-type]
        child = {name: pick([mother[name], father[name]]) for name in CHOICES}  # type: ignore[index]
        made.append(
            {name: pick(CHOICES[name]) if torch.rand((), generator=draw) < 0.12 else v for name, v in child.items()}
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14_000)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--train-period", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="/dev/stdout")
    parser.add_argument("--parents", nargs="*", default=[], help="files that earlier searches wrote")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    draw = torch.Generator().manual_seed(args.seed)
    configs = [
        {n: c[int(torch.randint(len(c), (), generator=draw))] for n, c in CHOICES.items()} for _ in range(args.configs)
    ]
    lines = [line for name in args.parents for line in Path(name).read_text().splitlines()]
    earlier = [json.loads(line)["config"] for line in lines]
    if earlier:
        configs = children(earlier, args.configs, draw)
    for round_number in range(args.rounds):
        began = time.time()
        settings = {
            n: torch.tensor([c[n] for c in configs], dtype=torch.float32, device=args.device).repeat_interleave(
                args.seeds
            )
            for n in CHOICES
        }
        args.seed += 1
        rows = ranked(configs, steps_to_target(settings, args).view(len(configs), args.seeds).cpu())
        print(
            f"round {round_number}: {time.time() - began:.0f} s, envs {args.envs}, batch {args.batch},"
            f" hidden {args.hidden}, period {args.train_period}",
            flush=True,
        )
        for row in rows[:5]:
            print(json.dumps(row), flush=True)
        with open(args.out, "a") as file:
            file.writelines(json.dumps({"round": round_number, "args": vars(args), **row}) + "\n" for row in rows[:40])
        best = [row["config"] for row in rows[: max(4, args.configs // 16)]]
        configs = best[: args.configs // 8] + children(best, args.configs - min(len(best), args.configs // 8), draw)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
