"""A group's twin: all ranks in one process do what real ranks do, update by update."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from role_cases import SPEC, Edge, Keep, random_batch

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.heads import ImplicitQuantileConfig
from qfleet.algo.optim import AdamConfig, SgdConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core import codec
from qfleet.core.errors import QfleetError
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Batch
from qfleet.core.usercode import UserCode
from qfleet.parallel.group import Group
from qfleet.parallel.plan import ParallelConfig
from qfleet.parallel.turns import TurnGroup, Turns
from qfleet.roles.joining import Joining
from qfleet.roles.learner import LearnerHandles
from qfleet.roles.learner_setup import GroupConfig, LearnerConfig, LearnerSetup
from qfleet.roles.learning import build_learning
from qfleet.roles.twin import LearnerTwin, TwinHandles

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from rank_threads import BUILDING, as_ranks

PLANS: dict[str, Any] = {
    "all-reduce": {},
    "local": {"update": {"kind": "local", "period": 3}},
    "local int8": {"update": {"kind": "local", "period": 3}, "compression": {"kind": "int8"}},
    "topk": {"compression": {"kind": "topk", "fraction": 0.05, "warmup": 4}},
    **{kind: {"compression": {"kind": kind}} for kind in ("fp16", "bf16", "int8", "sign")},
    "powersgd": {"compression": {"kind": "powersgd", "rank": 1}},
}
GATHERED = ("int8", "sign", "topk")
"""Forms that each rank adds up by itself, in the order of ranks."""
SHORT = {"fp16": 1e-3, "bf16": 1e-2}
"""Forms whose sums are rounded to a few digits, to others where a ring of three adds up in another order."""
UPDATES = 8


def setup(plan: str, agent: ReplayAgent | None = None, **settings: Any) -> LearnerSetup:
    return LearnerSetup(
        learner=LearnerConfig(**settings),
        network=MlpConfig(hidden=(16, 16)),
        agent=agent or ReplayAgent(),
        optim=AdamConfig(lr=0.01, eps=1e-3, max_grad_norm=1.0),
        spec=SPEC,
        seed=0,
        total_updates=100,
        evaluate_every=1000,
        env_steps=10_000,
        device="cpu",
        group=None,
        warm_start=None,
        warm_start_part="all",
        code=UserCode(),
        accel=AccelConfig(),
        parallel=ParallelConfig.model_validate(PLANS[plan]),
    )


def part(batch: Batch, rank: int, ranks: int) -> Batch:
    """Every so many rows, as a replay shard deals them out; the size stays that of the whole."""

    def rows(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rows(leaf) for name, leaf in value.items()}
        return value[rank::ranks].copy() if isinstance(value, np.ndarray) else value

    dealt = {field.name: rows(getattr(batch, field.name)) for field in fields(batch)}
    return replace(batch, **dealt | {"parts": ranks})


def batches(count: int = UPDATES, size: int = 17) -> list[Batch]:
    rng = np.random.default_rng(5)
    return [random_batch(rng, size) for _ in range(count)]


def learned(own: LearnerSetup) -> Callable[[Group], tuple[np.ndarray, np.ndarray]]:
    """Return what a rank does: learn from its parts of all batches, and tell its weights and last priorities."""

    def work(group: Group) -> tuple[np.ndarray, np.ndarray]:
        with BUILDING:
            update = build_learning(own, "learner", Joining(own.parallel, group, own.seed)).update
        for batch in batches():
            result = update(part(batch, group.rank, group.size))
        assert result.priority is not None
        return update.flat.to_numpy(), result.priority

    return work


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_in_turn_learn_what_real_ranks_learn(plan: str, ranks: int) -> None:
    """Bit for bit where sums have one order only; else norm-wise to the rounding of the sums."""
    turns, own = Turns(ranks), setup(plan)
    found = turns.together(lambda rank: learned(own)(TurnGroup(rank, turns)))
    real = as_ranks(ranks, learned(own))
    begun = build_learning(own, "learner", None).update.flat.to_numpy()
    for (weights, priority), (wanted, wanted_priority) in zip(found, real, strict=True):
        if ranks == 2 or plan in GATHERED:
            assert np.array_equal(weights, wanted)
            assert np.array_equal(priority, wanted_priority)
        assert np.linalg.norm(weights - wanted) <= SHORT.get(plan, 1e-5) * np.linalg.norm(wanted - begun)
    apart = plan.startswith("local")
    assert np.array_equal(found[0][0], found[1][0]) != apart, "eight updates are two more than two meetings"


def test_ranks_draw_their_own_numbers_in_turn_as_apart() -> None:
    """Implicit quantiles: parts of different sizes leave the ranks' random streams at different places."""
    own, turns = setup("all-reduce", ReplayAgent(head=ImplicitQuantileConfig(taus=3, cosines=4), noisy=True)), Turns(2)
    found = turns.together(lambda rank: learned(own)(TurnGroup(rank, turns)))
    for (weights, _), (wanted, _) in zip(found, as_ranks(2, learned(own)), strict=True):
        assert np.array_equal(weights, wanted)


class Rig:
    """A twin of learners with edges that remember what was sent; the first rank speaks."""

    def __init__(self, plan: str = "all-reduce", ranks: int = 2, keeps: Any = (None,) * 3, **settings: Any) -> None:
        self.ranks, self.keeps = ranks, keeps
        self.shown = {name: Edge() for name in ("weights", "models", "events")}
        self.batches, self.priorities = ([Edge() for _ in range(ranks)] for _ in range(2))
        self.env_steps, self.updates = Edge(), Edge()
        own = setup(plan, **settings)
        setups = tuple(replace(own, group=GroupConfig(rank, ranks, "")) for rank in range(ranks))
        self.twin = LearnerTwin(setups, TwinHandles(tuple(self._handles(rank) for rank in range(ranks))))

    def _handles(self, rank: int) -> LearnerHandles:
        return LearnerHandles(
            batches=(self.batches[rank],),
            priorities=(self.priorities[rank],),
            **(self.shown if rank == 0 else dict.fromkeys(self.shown)),
            score=Edge(),
            env_steps=self.env_steps,
            updates=self.updates,
            keep=self.keeps[rank],
        )

    def learn(self, batch: Batch) -> None:
        for rank, edge in enumerate(self.batches):
            edge.send(part(batch, rank, self.ranks))
        before = self.twin.step()
        assert before == WORKED

    @property
    def weights(self) -> list[np.ndarray]:
        return [state["update"]["step"]["weights"] for state in self.twin.state_dict()["ranks"]]


def test_the_twin_of_learners_is_a_learner_to_others() -> None:
    rig = Rig(publish_period=4)
    assert rig.twin.step() == WORKED, "the first weights are published"
    assert isinstance(rig.twin.step(), Idle)
    rig.env_steps.add(1000)  # a model is due: the first rank sends it while the second one waits in a sum
    for batch in batches():
        rig.learn(batch)
    assert len(rig.shown["models"].queue) == 1
    assert rig.updates.count == UPDATES, "counted once"
    real = as_ranks(2, learned(setup("all-reduce")))
    for rank, (wanted, priority) in enumerate(real):
        assert np.array_equal(rig.weights[rank], wanted)
        assert len(rig.priorities[rank].queue) == UPDATES
        assert np.array_equal(rig.priorities[rank].queue[-1].priority, priority)
    assert [sent.version.number for sent in rig.shown["weights"].queue] == [0, 4, 8]
    assert rig.twin.metrics()["gradient_bytes"] > 0
    for edge in rig.batches:
        edge.close()
    while (status := rig.twin.step()) != DONE:
        assert status == WORKED
    assert len(rig.shown["models"].queue) == 2
    rig.twin.close()


def test_a_rank_whose_loss_is_not_finite_is_named_and_no_rank_learns() -> None:
    rig = Rig(ranks=3)
    begun = rig.weights
    (batch,) = batches(1)
    batch.reward[1::3] = np.nan
    rig.learn(batch)
    assert "(learner 1)" in rig.shown["events"].queue[-1].text
    assert all(np.array_equal(now, then) for now, then in zip(rig.weights, begun, strict=True))
    rig.learn(batch)
    with pytest.raises(QfleetError, match="3 updates in a row were not finite"):
        rig.learn(batch)


def test_a_rank_that_learns_apart_and_skips_an_update_is_named_when_all_meet() -> None:
    rig = Rig("local", ranks=3, publish_period=4)
    for number, batch in enumerate(batches(8)):
        if number in (1, 3):
            batch.reward[1::3] = np.nan
        rig.learn(batch)
    told = [notice.text for notice in rig.shown["events"].queue if notice.kind == "skipped_update"]
    assert told == ["2 updates of learner 1 before update 4 were not finite: skipped"]
    assert rig.twin.metrics()["skipped_updates"] == 0


@pytest.mark.parametrize("plan", ["all-reduce", "local", "int8"])
def test_ranks_that_learn_from_different_draws_are_named_with_them(plan: str) -> None:
    """Their weights would be the same all the same, but for those of ranks that learn apart, which may differ."""
    rig = Rig(plan, ranks=3, publish_period=4)
    for number, batch in enumerate(batches(8), 1):
        for rank, edge in enumerate(rig.batches):
            behind = number > 5 and rank == 1
            edge.send(replace(part(batch, rank, 3), draw=number - behind))
    for _ in range(7):
        assert rig.twin.step() == WORKED
    text = "different draws: rank 0 from 8 of shard 0, rank 1 from 7 of shard 0, at update 8"
    with pytest.raises(QfleetError, match=text):
        rig.twin.step()


@pytest.mark.parametrize("plan", ["all-reduce", "local", "int8", "topk", "powersgd"])
def test_a_restored_twin_goes_on_bit_by_bit(plan: str) -> None:
    whole, cut, rest = (Rig(plan, ranks=3) for _ in range(3))
    for number, batch in enumerate(batches()):
        whole.learn(batch)
        if number == 4:
            rest.twin.load_state_dict(cut.twin.state_dict())
        (cut if number < 4 else rest).learn(batch)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(rest.weights, whole.weights, strict=True))


def test_ranks_go_on_apart_from_a_run_in_which_they_were_one_and_the_other_way_round() -> None:
    former, apart, one = (Rig(plan, ranks=3) for plan in ("all-reduce", "local", "all-reduce"))
    given = batches(12)
    for batch in given[:4]:
        former.learn(batch)
    apart.twin.load_state_dict(codec.roundtrip(former.twin.state_dict()))
    assert all(np.array_equal(now, former.weights[0]) for now in apart.weights)
    for number, batch in enumerate(given[4:8], 1):
        apart.learn(batch)
        same = [np.array_equal(apart.weights[0], other) for other in apart.weights[1:]]
        assert same == [number == 3] * 2, "they met at the checkpoint, and every third update since"
    one.twin.load_state_dict(codec.roundtrip(apart.twin.state_dict()))
    assert all(np.array_equal(now, apart.weights[0]) for now in one.weights)
    for batch in given[8:]:
        one.learn(batch)
    assert all(np.array_equal(now, one.weights[0]) for now in one.weights)


def test_parts_of_different_sizes_count_every_sample_alike_where_ranks_learn_apart() -> None:
    """With plain averaging after each plain step, all ranks together make the step of one."""
    sgd = SgdConfig(lr=0.1, max_grad_norm=None)
    plan = ParallelConfig.model_validate({"update": {"kind": "local", "period": 1, "outer_lr": 1, "outer_momentum": 0}})
    own = replace(setup("all-reduce"), optim=sgd)
    alone = build_learning(own, "learner", None).update
    begun, given = alone.flat.to_numpy(), batches(5, size=7)
    for batch in given:
        alone(batch)

    def together(ranks: int) -> list[np.ndarray]:
        turns = Turns(ranks)

        def work(rank: int) -> np.ndarray:
            joining = Joining(plan, TurnGroup(rank, turns), own.seed)
            update = build_learning(replace(own, parallel=plan), "learner", joining).update
            for batch in given:
                update(part(batch, rank, ranks))
            return update.flat.to_numpy()

        return turns.together(work)

    for ranks in (2, 3, 4):
        for found in together(ranks):
            assert np.linalg.norm(found - alone.flat.to_numpy()) <= 1e-5 * np.linalg.norm(found - begun)


def bits(state: Any) -> tuple[bytes, list[bytes]]:
    header, arrays = codec.pack(state)
    return header, [array.tobytes() for array in arrays]


def test_after_a_death_no_rank_has_the_compression_memory_of_another() -> None:
    """The first rank's state is shared; what it still owes would be paid once for each rank."""
    keeps = [Keep(), Keep()]
    former, new = Rig("int8", keeps=keeps), Rig("int8").twin.state_dict()["ranks"]
    for batch in batches(3):
        former.learn(batch)
    owed = former.twin.state_dict()["ranks"][0]["joining"]
    for keep in keeps:
        keep.life += 1
    first, second = Rig("int8", keeps=keeps).twin.state_dict()["ranks"]
    assert bits(first["update"]) == bits(second["update"]) != bits(new[0]["update"])
    assert bits(first["joining"]) == bits(owed) != bits(new[0]["joining"])
    assert bits(second["joining"]) == bits(new[1]["joining"])


def test_a_rank_that_had_left_when_its_run_was_saved_owes_nothing_when_it_is_back() -> None:
    """Its place in the checkpoint has the first rank's state."""
    former, resumed = Rig("topk"), Rig("topk")
    for batch in batches(3):
        former.learn(batch)
    state, new = former.twin.state_dict()["ranks"], Rig("topk").twin.state_dict()["ranks"]
    resumed.twin.load_state_dict(codec.roundtrip({"ranks": [state[0], state[0]]}))
    first, second = resumed.twin.state_dict()["ranks"]
    assert bits(first["joining"]) == bits(state[0]["joining"])
    assert bits(second["joining"]) == bits(new[1]["joining"])
