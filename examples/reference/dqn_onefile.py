"""The whole DQN algorithm on one page, to be read from top to bottom; needs torch, numpy and gymnasium only.

    python dqn_onefile.py --seed 1            # solves CartPole-v1 on one core

The idea. Q(s, a) is the discounted reward that the agent expects if it does `a` in state `s` and acts well ever
after. It obeys the Bellman equation, Q(s, a) = r + gamma * max_a' Q(s', a'), and DQN trains a network to obey it too:

    act      mostly greedily, at times at random              choose_actions
    remember n steps of reward and the state they led to      fold_n_step, Replay
    learn    pull Q(s, a) towards what the equation says       td_target, td_loss
    lag      let a slow copy of the network say it             update_target

Shapes in the comments: E environments, B batch items, D numbers in an observation, A actions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.nn import functional as F


class QNetwork(nn.Module):
    """Maps raw observations [B, D] to action values [B, A]."""

    def __init__(self, observation_size: int, actions: int, hidden: int, observation_scale: Sequence[float]) -> None:
        super().__init__()
        # Inputs of about unit size make the difference between learning and not learning here: CartPole's pole falls
        # at an angle of 0.21 while its cart may travel 2.4. As part of the network, the scale can never be forgotten.
        self.register_buffer("scale", torch.tensor(observation_scale, dtype=torch.float32))
        self.layers = nn.Sequential(
            nn.Linear(observation_size, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, actions),
        )

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation / self.scale)


# ---------------------------------------------------------------------------------------------------------- acting


def linear_epsilon(step: int, start: float, end: float, decay_steps: int) -> float:
    """The chance of a random action, falling in a straight line with the number of environment steps."""
    return start + (end - start) * min(1.0, step / decay_steps)


@torch.no_grad()
def choose_actions(network: QNetwork, observation: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Epsilon-greedy actions [E]. Every environment tosses its own coin: a common one would make them all explore,
    or all exploit, together."""
    values = network(torch.from_numpy(observation))
    random = rng.integers(values.shape[1], size=len(observation))
    return np.where(rng.random(len(observation)) < epsilon, random, values.argmax(1).numpy())


# ----------------------------------------------------------------------------------------------------- remembering


class Tick(NamedTuple):
    """One simultaneous step of all environments."""

    observation: np.ndarray  # [E, D]
    action: np.ndarray  # [E]
    reward: np.ndarray  # [E]
    next_observation: np.ndarray  # [E, D] what the action led to; after an episode's end NOT the next one's beginning
    terminated: np.ndarray  # [E] the episode ended by the rules: there is no future reward
    truncated: np.ndarray  # [E] the episode was cut by a time limit: there would have been a future


class Batch(NamedTuple):
    """Transitions that each carry all that the Bellman equation needs."""

    observation: Tensor  # [B, D]
    action: Tensor  # [B]
    reward: Tensor  # [B] r_0 + gamma r_1 + ... over the k <= n steps of the window
    discount: Tensor  # [B] gamma^k, or 0 if the window ended in termination
    next_observation: Tensor  # [B, D] the observation k steps later


def fold_n_step(window: Sequence[Tick], gamma: float) -> tuple[np.ndarray, ...]:
    """Fold n consecutive ticks into one n-step transition per environment, which starts at the oldest tick.

    Walking backwards from the newest tick, an episode's end makes the fold start afresh. So no return crosses from
    one episode into another, a window that meets an end is merely shorter (k < n, and gamma^k says so), and every
    step of every episode is the start of exactly one window. Termination forbids bootstrapping; truncation does not.
    """
    newest = window[-1]
    reward = np.zeros_like(newest.reward)
    discount = np.ones_like(newest.reward)
    next_observation = newest.next_observation
    for tick in reversed(window):
        ended = tick.terminated | tick.truncated
        reward = tick.reward + gamma * np.where(ended, 0.0, reward)
        discount = gamma * np.where(ended, ~tick.terminated, discount)
        next_observation = np.where(ended[:, None], tick.next_observation, next_observation)
    return window[0].observation, window[0].action, reward, discount, next_observation


class Replay:
    """A ring of the newest transitions, sampled uniformly.

    Each row is complete in itself, its successor included. That takes twice the memory of looking the successor up in
    the next row, but leaves nothing to go wrong at an episode's end, or at the seam where new rows overwrite old ones.
    """

    def __init__(self, capacity: int, observation_size: int) -> None:
        self.columns = (
            np.zeros((capacity, observation_size), np.float32),  # in the order of Batch
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.float32),
            np.zeros(capacity, np.float32),
            np.zeros((capacity, observation_size), np.float32),
        )
        self.capacity, self.cursor, self.size = capacity, 0, 0

    def add(self, transitions: Sequence[np.ndarray]) -> None:
        """Write one row per environment, over the oldest ones when the ring is full."""
        count = len(transitions[0])
        rows = (self.cursor + np.arange(count)) % self.capacity
        for column, values in zip(self.columns, transitions, strict=True):
            column[rows] = values
        self.cursor = (self.cursor + count) % self.capacity
        self.size = min(self.size + count, self.capacity)

    def sample(self, batch_size: int, rng: np.random.Generator) -> Batch:
        rows = rng.integers(self.size, size=batch_size)
        return Batch(*(torch.from_numpy(column[rows]) for column in self.columns))


# -------------------------------------------------------------------------------------------------------- learning


@torch.no_grad()
def td_target(online: nn.Module, target: nn.Module, batch: Batch, double: bool) -> Tensor:
    """What Q(s, a) should be, [B]: the reward on the way plus the discounted value of where it led.

    A maximum over noisy estimates is too high on average. Double DQN lets one network choose the action and the
    other one value it, so that the error of the choice and that of the value are no longer the same.
    """
    values = target(batch.next_observation)  # [B, A]
    choice = online(batch.next_observation) if double else values
    best = choice.argmax(1, keepdim=True)
    return batch.reward + batch.discount * values.gather(1, best).squeeze(1)


def td_loss(
    online: nn.Module, target: nn.Module, batch: Batch, double: bool = True, weight: Tensor | None = None
) -> Tensor:
    """The Huber loss between Q(s, a) and its target, averaged over the batch: squared when small, linear from 1 on.

    `weight` [B] is for samplers that are not uniform (importance weights); it multiplies each item's own loss.
    """
    prediction = online(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    per_item = F.huber_loss(prediction, td_target(online, target, batch, double), reduction="none")
    return (per_item if weight is None else weight * per_item).mean()


@torch.no_grad()
def update_target(online: nn.Module, target: nn.Module, tau: float) -> None:
    """Move the target network a part of the way: tau = 1 copies (hard update), a small tau averages (soft update)."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)


# ------------------------------------------------------------------------------------------------------ evaluating


def evaluate(network: QNetwork, env_id: str, episodes: int, seed: int) -> float:
    """Mean return of the greedy policy over whole episodes, each with a seed of its own."""
    envs = SyncVectorEnv([lambda: gym.make(env_id)] * episodes)
    rng = np.random.default_rng(seed)
    observation, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        actions = choose_actions(network, observation, 0.0, rng)
        observation, reward, terminated, truncated, _ = envs.step(actions)
        returns += reward * running  # an environment that has finished begins again; that is not counted
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


# -------------------------------------------------------------------------------------------------- the whole loop


def train(args: argparse.Namespace) -> dict[str, float | int | bool | str]:
    """Train until three evaluations in a row reach the target score, or the step budget is spent."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    # Without autoreset, `step` always returns what the action led to, and we reset finished episodes ourselves.
    envs = SyncVectorEnv([lambda: gym.make(args.env)] * args.envs, autoreset_mode=AutoresetMode.DISABLED)
    observation_size, actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    online, target = (QNetwork(observation_size, actions, args.hidden, args.observation_scale) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate, fused=True)
    replay = Replay(args.capacity, observation_size)
    window: deque[Tick] = deque(maxlen=args.n_step)

    observation, _ = envs.reset(seed=args.seed)
    env_steps = updates = in_a_row = 0
    next_evaluation, evaluation_s, start = args.evaluate_every, 0.0, time.perf_counter()
    while env_steps < args.env_steps and in_a_row < 3:
        # 1. Act in all environments at once, and remember.
        epsilon = linear_epsilon(env_steps, args.epsilon_start, args.epsilon_end, args.epsilon_decay)
        action = choose_actions(online, observation, epsilon, rng)
        next_observation, reward, terminated, truncated, _ = envs.step(action)
        window.append(Tick(observation, action, reward * args.reward_scale, next_observation, terminated, truncated))
        if len(window) == args.n_step:
            replay.add(fold_n_step(window, args.gamma))
        ended = terminated | truncated
        observation = envs.reset(options={"reset_mask": ended})[0] if ended.any() else next_observation
        env_steps += args.envs

        # 2. Learn as often as the steps so far call for, however many environments took them.
        while updates < (env_steps - args.learning_starts) // args.train_every:
            loss = td_loss(online, target, replay.sample(args.batch_size, rng), args.double)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            if updates % args.target_period == 0:
                update_target(online, target, args.tau)

        # 3. Judge the target network: being an average of many recent networks it is steadier than the online one.
        if env_steps >= next_evaluation:
            paused = time.perf_counter()
            score = evaluate(target, args.env, episodes=20, seed=1_000_000 * (args.seed + 1) + env_steps)
            in_a_row = in_a_row + 1 if score >= args.target_score else 0
            next_evaluation += args.evaluate_every
            evaluation_s += time.perf_counter() - paused
            print(f"{env_steps:7d} steps {updates:6d} updates  epsilon {epsilon:.2f}  mean return {score:6.1f}")

    seconds = time.perf_counter() - start - evaluation_s
    envs.close()
    return {
        "peer": "dqn_onefile",
        "seed": args.seed,
        "seconds": round(seconds, 3),
        "env_steps": env_steps,
        "updates": updates,
        "steps_per_s": round(env_steps / seconds, 1),
        "updates_per_s": round(updates / seconds, 1),
        "solved": in_a_row == 3,
        "final_mean": evaluate(target, args.env, episodes=100, seed=1_000_000_000 + args.seed),
    }


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The defaults are tuned for CartPole-v1; another environment needs at least its own --observation-scale."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = parser.add_argument
    flag("--env", default="CartPole-v1", help="id of a Gymnasium environment: vector observations, discrete actions")
    flag("--seed", type=int, default=1, help="of everything: networks, exploration, sampling, environments")
    flag("--threads", type=int, default=1, help="of torch")
    flag("--env-steps", type=int, default=50_000, help="give up after this many")
    flag("--target-score", type=float, default=475.0, help="solved at three evaluations in a row at this mean return")
    flag("--evaluate-every", type=int, default=1_000, help="environment steps between evaluations of 20 episodes")
    flag("--envs", type=int, default=16, help="environments that step together")
    flag("--train-every", type=int, default=4, help="environment steps per update")
    flag("--batch-size", type=int, default=128, help="transitions per update")
    flag("--learning-starts", type=int, default=256, help="environment steps before the first update")
    flag("--capacity", type=int, default=50_000, help="transitions that replay keeps")
    flag("--n-step", type=int, default=3, help="rewards summed before the bootstrap value")
    flag("--gamma", type=float, default=0.99, help="discount of one step")
    flag("--double", action=argparse.BooleanOptionalAction, default=True, help="Double DQN")
    flag("--tau", type=float, default=0.03, help="part of the way that the target network moves; 1 for hard updates")
    flag("--target-period", type=int, default=1, help="updates between moves of the target network")
    flag("--epsilon-start", type=float, default=1.0, help="chance of a random action at the beginning")
    flag("--epsilon-end", type=float, default=0.05, help="and at the end of the decay")
    flag("--epsilon-decay", type=int, default=2_000, help="environment steps of the decay")
    flag("--learning-rate", type=float, default=5e-4, help="of Adam")
    flag("--hidden", type=int, default=128, help="width of the two hidden layers")
    flag("--reward-scale", type=float, default=0.002, help="multiplies rewards: Q then begins near its final size")
    flag("--observation-scale", type=float, nargs="+", default=(2.4, 2.0, 0.21, 2.0), help="divides observations")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    settings = parse_args()
    torch.set_num_threads(settings.threads)
    print(json.dumps(train(settings)))
