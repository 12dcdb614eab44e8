"""A run goes on with other learners than it was saved with: with each draw once, and as one that never changed them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_cases import digest, short, stop_at

import qfleet.api as api
from qfleet import rearranging
from qfleet.control.monitor import Callbacks
from qfleet.core import codec
from qfleet.core.errors import ConfigError
from qfleet.core.role import State
from qfleet.core.types import Batch
from qfleet.experiment import Experiment
from qfleet.observe.sinks import read_jsonl
from qfleet.operating import standing
from qfleet.presets import preset
from qfleet.runtime import checkpoint
from qfleet.runtime.ownership import request_scale

SLOW = pytest.mark.slow
PRIORITISED = {"replay.sampler": {"kind": "prioritised"}}
WHOLE: dict[str, Any] = {
    "tensor": 1,
    "pipeline": 1,
    "update": {"kind": "allreduce"},
    "compression": {"kind": "none"},
}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data 2": (2, {}),
    "data 3": (3, {}),
    "tensor 2": (1, {"tensor": 2}),
    "pipeline 2": (1, {"pipeline": 2}),
    "data 2 x tensor 2": (2, {"tensor": 2}),
    "sharded": (2, {"update": {"kind": "sharded"}}),
    "local": (2, {"update": {"kind": "local", "period": 4}}),
    "topk": (2, {"compression": {"kind": "topk"}}),
    "int8": (2, {"compression": {"kind": "int8"}}),
    "powersgd": (2, {"compression": {"kind": "powersgd"}}),
    "sync": (2, {"update": {"kind": "server", "servers": 2, "mode": "sync"}}),
    "async": (3, {"update": {"kind": "server", "servers": 2, "mode": "async"}}),
    "stale, top-k": (2, {"update": {"kind": "server", "mode": "stale"}, "compression": {"kind": "topk"}}),
}


def in_turns(**changes: Any) -> Experiment:
    """Return a run whose roles take turns, with messages under way whenever it is cut."""
    small: dict[str, Any] = {
        "env_steps": 400,
        "actors": 2,
        "actor.envs": 4,
        "learner.learning_starts": 100,
        "learner.batch_size": 12,
        "learner.train_period": 8.0,
        "network.hidden": [16],
        "evaluation.every": 100,
        "evaluation.max_episode_steps": 40,
        "topology": "pipeline",
        "lockstep": True,
        "placement": "inline",
    }
    return short("dqn", "cartpole", **{**small, **changes})


def last(run: api.Run, name: str) -> State:
    return checkpoint.read_state(checkpoint.newest_good(run.dir / "checkpoints").directory, name)


def resumed(run: api.Run, plan: str, **more: Any) -> api.Run:
    learners, parallel = PLANS[plan]
    return api.resume(run.dir, learners=learners, parallel={**WHOLE, **parallel}, **more)


@pytest.mark.parametrize(
    ("plans", "changes"),
    [
        (["data 2", "data 3"], {}),
        (["sync"], {}),
        (["data 2", "data 3"], PRIORITISED),
        pytest.param(["data 3", "data 2"], {"replay.shards": 2}, marks=SLOW),
        pytest.param(["data 3", "sync"], {"replay.shards": 2, **PRIORITISED}, marks=SLOW),
        pytest.param(["data 2", "sync", "data 3"], {}, marks=SLOW),
        pytest.param(["data 2"], {"learner.updates_per_draw": 2, "learner.batch_size": 16}, marks=SLOW),
    ],
)
def test_its_draws_and_updates_are_those_of_a_run_that_never_changed(plans, changes, tmp_path):
    uncut = api.train(in_turns(**changes), seed=5, run_dir=tmp_path / "uncut")
    run = api.train(in_turns(**changes), seed=5, run_dir=tmp_path / "run", callbacks=stop_at(150))
    for number, plan in enumerate(plans, 2):
        run = resumed(run, plan, placement="inline", callbacks=stop_at(90 * number))
    run = resumed(run, "one", placement="inline")
    assert run.summary["updates"] == uncut.summary["updates"]
    generators = [digest(last(one, "replay-0")["replay"]["rng"]) for one in (uncut, run)]
    assert generators[0] == generators[1], "as many random numbers were drawn"
    expected, found = (last(one, "learner-0") for one in (uncut, run))
    assert found["counters"] == expected["counters"]
    if changes.get("replay.sampler") is None:  # priorities that differ by a rounding lead to other draws
        pairs = zip(codec.pack(found["update"])[1], codec.pack(expected["update"])[1], strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def everything(env_steps: int, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "placement": "processes",
        "network.hidden": [32, 32],
        "learner.publish_period": 8,
        **PRIORITISED,
    }
    return short(env_steps=env_steps, **{**settings, **changes})


@pytest.mark.parametrize("plans", [["async"], pytest.param([*PLANS, "async", "one"], marks=SLOW)], ids=len)
def test_one_run_goes_through_plans_in_processes_and_learns_from_each_draw_once(plans, tmp_path):
    run = api.train(everything(600), seed=3, run_dir=tmp_path / "run", callbacks=stop_at(500))
    steps = [run.summary["env_steps"]]
    for number, plan in enumerate(plans, 2):
        cut = stop_at(600 * number - 100)  # in the middle, with batches, priorities and gradients on their way
        run = resumed(run, plan, env_steps=600 * number, callbacks=cut)
        steps.append(run.summary["env_steps"])
    run = api.resume(run.dir)
    assert steps == sorted(steps)
    # A gradient that was on its way to a server is left out when the servers are: at most two of each worker.
    lost = 2 * sum(PLANS[plan][0] for plan in plans if "update" in PLANS[plan][1])
    owed = (run.summary["env_steps"] - 200) / 4
    assert owed - lost - 1 <= run.summary["updates"] <= owed + 1
    assert run.summary["resume_grade"] == "episode"


def test_gradients_take_another_form_from_now_on(tmp_path):
    two = in_turns(learners=2, lockstep=False, **{"parallel.compression.kind": "topk"})
    run = api.train(two, seed=5, run_dir=tmp_path / "run", callbacks=stop_at(150))
    forms = ({"kind": "int8"}, {"kind": "powersgd", "rank": 1}, {"rank": 2}, {"kind": "topk"}, {"kind": "none"})
    for number, form in enumerate(forms, 2):
        run = api.resume(run.dir, parallel={"compression": form}, callbacks=stop_at(60 * number))
    run = api.resume(run.dir)
    assert run.summary["updates"] == (run.summary["env_steps"] - 100) // 8


def test_ranks_in_one_process_and_in_their_own_read_each_others_checkpoints(tmp_path):
    run = api.train(in_turns(learners=2, lockstep=False), seed=5, run_dir=tmp_path / "run", callbacks=stop_at(150))
    run = api.resume(run.dir, placement="processes", callbacks=stop_at(250))
    run = api.resume(run.dir, placement="inline")
    assert run.summary["updates"] == (run.summary["env_steps"] - 100) // 8
    first, second = (rank["update"]["step"]["weights"] for rank in last(run, "learner-0")["ranks"])
    np.testing.assert_array_equal(first, second)


def test_what_cannot_be_done_leaves_the_run_as_it_was(tmp_path):
    run = api.train(in_turns(lockstep=False), seed=5, run_dir=tmp_path / "run", callbacks=stop_at(150))
    before = (run.dir / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match="tensor 3"):
        api.resume(run.dir, placement="processes", parallel={"tensor": 3})
    assert (run.dir / "config.yaml").read_bytes() == before
    assert api.resume(run.dir).summary["env_steps"] >= 400


def test_a_plan_that_fails_once_its_checkpoint_is_made_leaves_the_old_one_the_newest(tmp_path, monkeypatch):
    run = api.train(in_turns(lockstep=False), seed=5, run_dir=tmp_path / "run", callbacks=stop_at(150))
    before = (run.dir / "config.yaml").read_bytes(), checkpoint.complete(run.dir / "checkpoints")

    def refused(*arguments: Any) -> Any:
        raise ConfigError("there is no room for so many")

    monkeypatch.setattr("qfleet.session.place", refused)
    with pytest.raises(ConfigError, match="no room for so many"):
        api.resume(run.dir, learners=3, placement="inline")
    assert ((run.dir / "config.yaml").read_bytes(), checkpoint.complete(run.dir / "checkpoints")) == before


@pytest.mark.parametrize("learners", [1, pytest.param(2, marks=SLOW)])
def test_the_limiter_of_a_run_in_processes_stays_as_it_was_over_a_resume(learners, tmp_path):
    settings = {"learner.train_period": 1.0, "learner.batch_size": 256, "network.hidden": [256]}
    run = api.train(everything(2000, **settings), seed=3, run_dir=tmp_path / "run", callbacks=stop_at(600))
    before = last(run, "replay-0")["limiter"]
    run = api.resume(run.dir, env_steps=900, learners=learners)
    assert before["forgiven"] == last(run, "replay-0")["limiter"]["forgiven"] == 0.0
    assert abs(run.summary["updates"] - (run.summary["env_steps"] - 200)) <= 1


@pytest.mark.slow
def test_a_number_of_learners_that_is_asked_for_holds_for_a_run_that_may_grow(tmp_path):
    elastic = everything(3000, learners=1, **{"elastic.max_learners": 3, "elastic.automatic": "off"})
    run = api.train(elastic, seed=3, run_dir=tmp_path / "run", callbacks=stop_at(500))
    run = api.resume(run.dir, learners=2, env_steps=900)
    standing = checkpoint.newest_good(run.dir / "checkpoints").manifest["standing"]
    assert standing["learners"] == 2
    assert abs(run.summary["updates"] - (run.summary["env_steps"] - 200) / 4) <= 1


def share(number: int, parts: int) -> Batch:
    """Two items of a draw, which no test looks at."""
    items = {"observation": {}, "next_observation": {}}
    values = dict.fromkeys(("action", "reward", "discount", "weight", "index", "generation"), np.zeros(2))
    return Batch(**items, **values, draw=number, parts=parts)  # type: ignore[arg-type]


def lanes(*draws: list[int], parts: int) -> dict[int, list[Batch]]:
    return {rank: [share(number, parts) for number in numbers] for rank, numbers in enumerate(draws)}


@pytest.mark.parametrize(
    ("waiting", "split", "whole", "to_learn"),
    [
        (lanes([5, 6], parts=1), 1, [5, 6], 2),
        (lanes([5, 6], [5, 6], parts=2), 1, [5, 6], 2),
        (lanes([5, 6], [5, 6], [], [], parts=2), 1, [5, 6], 2),  # two of four are gone
        (lanes([5], [5], [5], [5], parts=2), 2, [5], 1),
        (lanes([5, 6, 7], [6, 7], [6, 7], parts=3), 1, [], 3),  # the first rank is behind: all is drawn again
        (lanes([6], [5, 6], parts=2), 1, [], 1),
        (lanes([5, 8], [6], [7, 9], parts=1), 1, [5, 6, 7, 8, 9], 5),  # dealt to whoever had room
    ],
)
def test_what_waited_is_put_together_or_drawn_again(waiting, split, whole, to_learn):
    assert [draw.draw for draw in rearranging._whole_draws(waiting, split)] == whole
    assert rearranging._to_learn(waiting) == to_learn


@pytest.mark.slow
def test_draws_for_which_there_is_no_room_are_made_again(tmp_path):
    """Three workers have a batch each before them; of one learner in turns one batch fits into the stream."""
    serving = {"kind": "server", "servers": 1, "mode": "async"}
    busy = {"learner.train_period": 1.0, "learner.batch_size": 256, "network.hidden": [256, 256]}
    many = everything(4000, learners=3, **{"parallel.update": serving}, **busy)
    run = api.train(many, seed=3, run_dir=tmp_path / "run", callbacks=stop_at(700))
    run = api.resume(run.dir, env_steps=1000, learners=1, placement="inline", parallel=WHOLE)
    assert last(run, "replay-0")["limiter"]["forgiven"] == 0.0
    owed = run.summary["env_steps"] - 200
    assert owed - 7 <= run.summary["updates"] <= owed, "but for gradients that were on their way"


def test_other_fused_loops_are_refused_with_what_fits(tmp_path):
    loop = short("pqn", "cartpole", 2048, topology="auto", env=preset("cartpole").env, learners=2, placement="inline")
    run = api.train(loop, seed=5, run_dir=tmp_path / "run", callbacks=stop_at(1000))
    with pytest.raises(ConfigError, match="saved with 2 fused loops in one process"):
        api.resume(run.dir, learners=1)
    assert standing(run.dir).state == "finished", "what is refused is no failure of the run"
    assert api.resume(run.dir).summary["env_steps"] >= 2048


KILLED = "import sys, qfleet.api\nqfleet.api.resume(sys.argv[1], learners=2, placement='inline')"


def killed_on_the_way(run: Path, point: str, script: str = KILLED) -> None:
    """Resume a run with two learners in a process that is killed at a point, before or after there is a placement."""
    fail = ",".join(f"{role}/{point}:kill@1" for role in ("driver", "inline", "supervisor"))
    done = subprocess.run([sys.executable, "-c", script, str(run)], env=os.environ | {"QFLEET_FAIL": fail})
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("point", "learners"),
    [
        ("resume.before_rearranging", 1),
        ("checkpoint.before_manifest", 1),
        ("resume.before_settings", 1),
        ("write.config", 1),
        ("resume.after_settings", 2),
        ("checkpoint.before_rename", 2),
    ],
)
def test_whoever_is_killed_on_the_way_to_another_plan_leaves_a_run_that_goes_on(point, learners, tmp_path):
    uncut = api.train(in_turns(), seed=5, run_dir=tmp_path / "uncut")
    run = api.train(in_turns(), seed=5, run_dir=tmp_path / "run", callbacks=stop_at(150))
    before = checkpoint.complete(run.dir / "checkpoints")
    killed_on_the_way(run.dir, point)
    assert checkpoint.complete(run.dir / "checkpoints") == before
    resumed = api.resume(run.dir)
    assert Experiment.from_yaml(run.dir / "config.yaml").learners == learners
    assert resumed.summary["env_steps"] == 400
    assert resumed.summary["updates"] == uncut.summary["updates"]


def scaled_to(learners: int, run: Path) -> Callbacks:
    """Callbacks that ask a run for so many learners, and end it when it has them."""
    asked: list[str] = []

    def on_step(metrics: dict[str, Any], stop: Any) -> None:
        if not asked and metrics["env_steps"] >= 300:
            asked.append(request_scale(run, learners=learners))
        if asked and any(event["event"] == "scaled" for event in read_jsonl(run / "events.jsonl")):
            stop()

    return Callbacks(on_step=on_step)


def learners_of(run: Path) -> int:
    return int(checkpoint.newest_good(run / "checkpoints").manifest["standing"]["learners"])


@pytest.mark.parametrize("asked", [1, pytest.param(2, marks=SLOW)])
def test_whoever_is_killed_on_the_way_leaves_a_run_that_was_scaled_as_many_learners_as_it_had(asked, tmp_path):
    """The checkpoint of the other learners stayed, and a plain resume went on with their number."""
    elastic = {"elastic.max_learners": 3, "elastic.automatic": "off", "network.input.normalize": False}
    run = tmp_path / "run"
    done = api.train(everything(10**6, learners=1, **elastic), seed=3, run_dir=run, callbacks=scaled_to(3, run))
    assert learners_of(run) == 3
    script = f"import sys, qfleet.api\nqfleet.api.resume(sys.argv[1], learners={asked})"
    killed_on_the_way(run, "resume.before_settings", script)
    api.resume(run, callbacks=stop_at(done.summary["env_steps"] + 100))
    assert learners_of(run) == 3


def test_whoever_is_killed_on_the_way_to_a_plan_that_cannot_be_leaves_a_run_that_goes_on(tmp_path):
    """The new plan was in config.yaml before it was tried, and every further resume was refused."""
    loop = short("pqn", "cartpole", 2048, topology="auto", env=preset("cartpole").env, placement="inline")
    run = api.train(loop, seed=5, run_dir=tmp_path / "run", callbacks=stop_at(1000))
    killed_on_the_way(run.dir, "resume.before_rearranging")
    assert api.resume(run.dir).summary["env_steps"] >= 2048
