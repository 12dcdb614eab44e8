"""The tensor versions of CartPole, Acrobot, Maze and Catch play exactly as the ones that they are named after.

What every tensor game promises (nothing waits, one graph, no shared memory) is tested here for all of them.
"""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from qfleet.envs.small import catch as small_catch
from qfleet.envs.small import maze as small_maze
from qfleet.envs.tensor.acrobot import Acrobot
from qfleet.envs.tensor.cartpole import CartPole
from qfleet.envs.tensor.catch import Catch
from qfleet.envs.tensor.games import TensorConfig, make_tensor_env
from qfleet.envs.tensor.maze import Maze
from qfleet.envs.tensor.protocol import TensorEnv

MINATAR = ["breakout", "asterix", "freeway", "seaquest", "space_invaders"]
GAMES = ["cartpole", "acrobot", "maze", "catch", *[f"minatar-{game}" for game in MINATAR]]
SMALL_MAZE = "S.#\n..#\n#.G"


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gymnasium_moves(env_id: str, physics: torch.Tensor, action: torch.Tensor) -> list[list]:
    """Return what Gymnasium makes of each row: observations, states, rewards and ends."""
    env = gymnasium.make(env_id).unwrapped
    env.reset(seed=0)
    outcomes = []
    for row, number in zip(physics.double().numpy(), action.tolist(), strict=True):
        env.state, env.steps_beyond_terminated = row.copy(), None
        observation, reward, ended, _, _ = env.step(number)
        outcomes.append([observation, np.array(env.state), reward, ended])
    return [np.array(column) for column in zip(*outcomes, strict=True)]


def steady(observation: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Push the cart under the pole, half the time at random: episodes of all lengths."""
    lean = observation[:, 2] + 0.5 * observation[:, 3] + 0.03 * observation[:, 1] + 0.01 * observation[:, 0]
    return torch.where(random < 0.5, random < 0.25, lean > 0).long()


def pumping(observation: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Push the way the lower link goes, one time in five at random: many episodes reach the line."""
    return torch.where(random < 0.2, (random * 15).long(), (observation[:, 5] > 0).long() * 2)


@pytest.mark.parametrize(
    ("game", "env_id", "policy", "dtype", "tolerance"),
    [
        (CartPole, "CartPole-v1", steady, torch.float64, 1e-12),
        (CartPole, "CartPole-v1", steady, torch.float32, 1e-6),
        (Acrobot, "Acrobot-v1", pumping, torch.float64, 1e-12),
        (Acrobot, "Acrobot-v1", pumping, torch.float32, 1e-5),
    ],
)
def test_physics_equal_gymnasium_step_by_step(game, env_id, policy, dtype, tolerance):
    """Every step from the same state; tolerances are in rad, m and their rates of up to 17 per second."""
    env, generator = TensorEnv(game(dtype=dtype), time_limit=150), numbers(1)
    state = env.reset(torch.rand(24, 4, generator=generator))
    ends = cuts = 0
    for _ in range(400):
        random = torch.rand(24, 5, generator=generator)
        action = policy(env.observe(state)["observation"], random[:, 4])
        before = state["physics"]
        state, outcome = env.step(state, action, random[:, :4])
        valid = outcome.valid.numpy()
        observation, physics, reward, ended = gymnasium_moves(env_id, before[valid], action[valid])
        np.testing.assert_allclose(state["physics"][valid].double().numpy(), physics, rtol=0, atol=tolerance)
        np.testing.assert_allclose(
            env.observe(state)["observation"][valid].numpy(), observation, rtol=1e-6, atol=max(tolerance, 1e-7)
        )
        np.testing.assert_array_equal(outcome.reward[valid].numpy(), reward)
        np.testing.assert_array_equal(outcome.terminated[valid].numpy(), ended)
        ends, cuts = ends + int(ended.sum()), cuts + int(outcome.truncated.sum())
    assert ends > 10
    assert cuts > 0


def test_acrobot_equals_gymnasium_at_any_speed():
    """Angles wrap several times and speeds reach their limits."""
    generator = np.random.default_rng(2)
    physics = torch.from_numpy(generator.uniform(-1, 1, (3000, 4)) * np.array([1, 1, 4, 9]) * np.pi)
    action = torch.from_numpy(generator.integers(0, 3, 3000))
    moved, reward, over = Acrobot(dtype=torch.float64).move({"physics": physics}, action, torch.zeros(3000, 4))
    _, expected, rewards, ended = gymnasium_moves("Acrobot-v1", physics, action)
    np.testing.assert_allclose(moved["physics"].numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(reward.numpy(), rewards)
    np.testing.assert_array_equal(over.numpy(), ended)
    assert (expected[:, 2:] == np.array([4, 9]) * np.pi).any(axis=0).all()
    assert 0 < ended.sum() < 3000


@pytest.mark.parametrize(("game", "reach"), [(CartPole, 0.05), (Acrobot, 0.1)])
def test_starts_are_spread_as_gymnasium_spreads_them(game, reach):
    physics = game().start(torch.rand(4000, 4, generator=numbers(3)))["physics"]
    assert physics.dtype == torch.float32
    assert (physics.abs() <= reach).all()
    assert torch.allclose(physics.std(0), torch.full((4,), 2 * reach / 12**0.5), rtol=0.05)
    assert (game().start(torch.tensor([[0.0] * 4]))["physics"] == -reach).all()


def test_a_balanced_cart_is_stopped_by_the_limit_as_gymnasium_stops_it():
    env, theirs = make_tensor_env(TensorConfig(game="cartpole")), gymnasium.make("CartPole-v1")
    state = env.reset(torch.full((1, 4), 0.6))
    theirs.reset(seed=0)
    for step in range(1, 501):
        action = steady(env.observe(state)["observation"], torch.ones(1))
        theirs.unwrapped.state = state["physics"][0].double().numpy()
        state, outcome = env.step(state, action, torch.rand(1, 4))
        _, reward, ended, stopped, _ = theirs.step(int(action))
        mine = (float(outcome.reward), bool(outcome.terminated), bool(outcome.truncated))
        assert mine == (reward, ended, stopped) == (1.0, False, step == 500)


@pytest.mark.parametrize("layout", [small_maze.DEFAULT, SMALL_MAZE])
def test_maze_equals_the_small_one(layout):
    theirs = [gymnasium.wrappers.TimeLimit(small_maze.Maze(layout), 60) for _ in range(20)]
    cells = [env.reset()[0] for env in theirs]
    env, rng = TensorEnv(Maze(layout), time_limit=60), np.random.default_rng(0)
    assert env.spec.observations["observation"].categories == theirs[0].observation_space.n
    state = env.reset(torch.rand(20, 0))
    ends = 0
    for _ in range(200):
        assert env.observe(state)["observation"].tolist() == cells
        action = rng.integers(0, 4, 20)
        state, outcome = env.step(state, torch.from_numpy(action), torch.rand(20, 0))
        for index, game in enumerate(theirs):
            if not outcome.valid[index]:
                cells[index] = game.reset()[0]
                continue
            cells[index], reward, ended, stopped, _ = game.step(int(action[index]))
            mine = (outcome.reward[index].item(), outcome.terminated[index].item(), outcome.truncated[index].item())
            assert mine == (reward, ended, stopped)
            ends += ended
    assert ends > 0


def test_maze_is_drawn_as_the_small_one_is():
    theirs = small_maze.Maze(SMALL_MAZE, render_mode="rgb_array")
    theirs.reset()
    cell, *_ = theirs.step(1)
    np.testing.assert_array_equal(Maze(SMALL_MAZE).draw({"cell": torch.tensor([0, cell])}, 1), theirs.render())


@pytest.mark.parametrize(("rows", "columns"), [(10, 5), (4, 7)])
def test_catch_equals_the_small_one(rows, columns):
    theirs = [small_catch.Catch(rows, columns, render_mode="rgb_array") for _ in range(20)]
    boards = [env.reset(seed=seed)[0] for seed, env in enumerate(theirs)]
    tops = [board[:, :-1] for board in boards]

    def chosen() -> torch.Tensor:
        """Return the numbers that make ours drop the balls where theirs fall."""
        return torch.tensor([[(board[0].any(axis=0).argmax() + 0.5) / columns] for board in tops])

    env, rng = TensorEnv(Catch(rows, columns)), np.random.default_rng(0)
    state = env.reset(chosen())
    for _ in range(150):
        np.testing.assert_array_equal(env.observe(state)["observation"].numpy(), np.array(boards))
        np.testing.assert_array_equal(env.game.draw(state, 3), theirs[3].render())
        action, begins = rng.integers(0, 3, 20), state["ended"].tolist()
        outcomes = []
        for index, game in enumerate(theirs):
            if begins[index]:
                boards[index], outcome = game.reset()[0], (0.0, False)
                tops[index] = boards[index][:, :-1]
            else:
                boards[index], *outcome = game.step(int(action[index]))[:3]
            outcomes.append(tuple(outcome))
        state, mine = env.step(state, torch.from_numpy(action), chosen())
        assert list(zip(mine.reward.tolist(), mine.terminated.tolist(), strict=True)) == outcomes


@pytest.mark.parametrize("game", GAMES)
def test_no_operation_waits_for_the_device_or_leaves_it(game):
    """Tensors without values, on a device of their own: whatever looks at a value or stays on the CPU raises."""
    env = make_tensor_env(TensorConfig(game=game))
    random = torch.rand(8, env.draws, device="meta")
    state = env.reset(random)
    state, outcome = env.step(state, torch.zeros(8, dtype=torch.int64, device="meta"), random)
    tensors = [*state.values(), *env.observe(state).values(), *vars(outcome).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert outcome.reward.dtype == torch.float32
    for name, leaf in env.spec.observations.items():
        observed = env.observe(state)[name]
        assert (observed.shape[1:], str(observed.dtype)) == (leaf.shape, f"torch.{leaf.dtype}")


@pytest.mark.parametrize("game", GAMES)
def test_a_step_is_one_graph(game):
    torch.compiler.reset()  # what it has compiled counts against a limit, whichever game it was for
    env, generator = make_tensor_env(TensorConfig(game=game)), numbers(5)
    state = env.reset(torch.rand(4, env.draws, generator=generator))
    step = torch.compile(env.step, backend="eager", fullgraph=True)
    for _ in range(12):
        action = torch.randint(env.spec.actions, (4,), generator=generator)
        random = torch.rand(4, env.draws, generator=generator)
        following, outcome = env.step(state, action, random)
        compiled, compiled_outcome = step(state, action, random)
        assert all(torch.equal(compiled[name], value) for name, value in following.items())
        assert torch.equal(compiled_outcome.reward, outcome.reward)
        state = following


@pytest.mark.parametrize("game", GAMES)
def test_observations_do_not_share_memory_with_the_state(game):
    """A loop may write the next state into the tensors of the last one and still hold what was observed."""
    env = make_tensor_env(TensorConfig(game=game))
    state = env.reset(torch.rand(3, env.draws))
    observation = env.observe(state)["observation"]
    before = observation.clone()
    for value in state.values():
        value.fill_(1)
    assert torch.equal(observation, before)


def test_the_pole_leans_and_the_links_swing_in_pictures():
    def where(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
        return np.argwhere((picture == colour).all(axis=2)).mean(axis=0)

    physics = torch.tensor([[0.0, 0, 0.2, 0], [0.0, 0, -0.2, 0], [1.0, 0, 0, 0]])
    left, right, far = (CartPole().draw({"physics": physics}, index) for index in (1, 0, 2))
    assert left.shape == (160, 240, 3)
    assert left.dtype == np.uint8
    pole, cart = (202, 111, 30), (52, 73, 94)
    assert where(left, pole)[1] < where(left, cart)[1] < where(right, pole)[1] < where(far, pole)[1]
    hanging, raised = (Acrobot().draw({"physics": torch.tensor([[angle, 0.0, 0, 0]])}, 0) for angle in (0.0, 3.1))
    assert hanging.shape == (200, 200, 3)
    assert where(hanging, cart)[0] > 100 > where(raised, cart)[0]
