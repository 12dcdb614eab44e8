"""`qfleet bench pipeline` measures what it says, in small."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qfleet.bench import edges, full, overlap, pong
from qfleet.bench.pace import Pace, measure_pace
from qfleet.experiment import with_changes
from qfleet.presets import preset


def test_each_edge_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_MESSAGES": 20, "_REFRESHES": 8, "_PACED_S": 0.3, "_ROUNDS": 1}.items():
        monkeypatch.setattr(edges, name, value)
    frames, refresh, messages = edges.measure()
    assert 0.01 < float(frames.ours.split()[0]) < 100
    assert 0.1 < float(refresh.ours.split()[0]) < 1000
    assert 0 < float(messages.ours.rstrip("%")) < 100
    assert all(row.goal for row in (frames, refresh, messages))


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_the_pace_of_a_run_is_that_of_its_counters(placement: str) -> None:
    pace = measure_pace(overlap.experiment(placement, period=16), overlap.CODE, seconds=1.5, warm_updates=1)
    assert pace.env_steps > 0
    assert pace.updates == pytest.approx(pace.env_steps / 16, abs=12)  # some are on their way
    assert pace.steps_per_s <= pace.env_steps / 1.5
    assert {"actor", "replay", "learner"} <= set(pace.busy_s)
    assert 0 <= pace.busy_share("learner") <= 1


def made_up(steps_per_s: float, actor: float, learner: float) -> Pace:
    return Pace(steps_per_s, 100, 400, {"actor": actor, "learner": learner}, {"actor": 0.0, "learner": 1.0 - learner})


def test_learning_is_made_to_cost_as_much_as_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(wanted: Any, code: Any, seconds: float) -> Pace:  # an update that costs 6 steps
        rate = {"inline": 1000.0, "processes": 1700.0}[wanted.placement]
        return made_up(rate, 1.0, 6 / wanted.learner.train_period)

    monkeypatch.setattr(overlap, "measure_pace", run)
    assert overlap.calibrated(1.0) == (pytest.approx(6.0), pytest.approx(1.0))
    (row,) = overlap.measure(1.0, rounds=1)
    assert row.ratio == pytest.approx(1.7)
    assert row.met is True


def test_a_calibration_that_fails_meets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "measure_pace", lambda *_: made_up(1000.0, 1.0, 2.0))
    (row,) = overlap.measure(1.0, rounds=1)
    assert row.met is None


def test_pong_stands_beside_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(python: Path, script: str, *words: str) -> dict[str, float]:
        assert (Path("benchmarks/peers") / script).is_file()
        alone = 800.0 if "--envs" in words else 400.0
        rate = alone if "--acting-only" in words else 60.0
        return {"steps_per_s": rate + float(words[words.index("--threads") + 1])}

    monkeypatch.setattr(pong, "train", lambda threads, seconds, precision: made_up(100.0 * threads, 0.1, 0.97))
    monkeypatch.setattr(pong, "act", lambda threads, seconds: 1000.0 * threads)
    monkeypatch.setattr(pong, "run_peer", peer)
    monkeypatch.setattr(pong, "peer_python", lambda environment: Path("python"))
    monkeypatch.setattr(pong, "_threads", lambda: [1, 2])
    busy, training, rounded, acting, beside_several = pong.measure(rounds=2)
    assert busy.met is True
    assert busy.ours == "97.0%"
    assert training.ratio == rounded.ratio == pytest.approx(200 / 62)
    assert training.met is True
    assert acting.ratio == pytest.approx(2000 / 402)
    assert acting.met is False
    assert beside_several.ratio == pytest.approx(2000 / 802)
    assert beside_several.met is None


def test_pong_without_a_peer_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pong, "train", lambda threads, seconds, precision: made_up(100.0, 0.1, 0.9))
    monkeypatch.setattr(pong, "act", lambda threads, seconds: 1000.0)
    rows = pong.measure(rounds=1)
    assert [row.ratio for row in rows] == [None] * 5
    assert [row.met for row in rows] == [False, *[None] * 4]


def test_both_sides_play_by_the_same_settings() -> None:
    pytest.importorskip("ale_py")
    ours = pong.experiment()
    script = Path("benchmarks/peers/sb3_pong.py").read_text()
    assert (ours.learner.batch_size, ours.learner.train_period) == (32, 4)
    assert ours.agent.target.period * ours.learner.train_period == 1_000
    for setting in ("batch_size=32", "PERIOD = 4", "target_update_interval=1_000", "buffer_size=10_000"):
        assert setting in script
    assert (ours.env.sticky_actions, ours.env.noop_max, ours.env.life_loss) == (0.25, 0, False)
    assert ours.replay.capacity == 10_000


def test_a_planned_run_is_measured_with_the_cores_that_it_keeps_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def planned(changes: Any, seconds: float) -> Pace:
        seen.append(dict(changes))
        return replace(made_up(18_000.0, 1.0, 0.1), cores_busy=0.93)

    monkeypatch.setattr(full, "planned", planned)
    monkeypatch.setattr(full, "raw_rate", lambda: 19_000.0)
    monkeypatch.setattr(full.torch.cuda, "is_available", lambda: True)
    cores, raw, at_once, gpu = full.measure(0.1)
    assert (cores.ours, cores.met) == ("93%", True)
    assert (raw.ratio, raw.met) == (at_once.ratio, at_once.met) == (pytest.approx(18 / 19), True)
    assert [row.what.split(",")[1] for row in (raw, at_once)] == [
        " one update of 32 in 4 steps",
        " one update of 256 in 32 steps",
    ]
    assert (gpu.ours, gpu.met) == ("unknown", None), "no look was taken in a tenth of a second"
    assert seen == [full.RARELY, full.USUALLY, full.AT_ONCE, full.OFTEN]


def test_fewer_updates_of_more_draw_as_many_samples_for_each_step() -> None:
    per_step = []
    for changes in (full.USUALLY, full.AT_ONCE):
        learner = with_changes(preset("atari:pong"), changes).learner
        per_step.append(learner.batch_size / learner.train_period)
    assert per_step == [8, 8]


@pytest.mark.parametrize(("begins", "kind"), [("local", "local"), ("served", "served")])
def test_inference_that_may_move_stays_where_it_begins(begins: str, kind: str) -> None:
    moving = {"placement": "processes", "spare_actors": 1, "inference.kind": "adaptive", "inference.begins": begins}
    stays = full.settled(with_changes(preset("mountaincar"), {**moving, "inference.precision": "bf16"}))
    assert (stays.inference.kind, stays.inference.precision) == (kind, "bf16")
    assert with_changes(stays, {"balance": "off"}).spare_actors == 0


def test_the_emulators_alone_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    monkeypatch.setattr(full, "RAW_GAMES", 2)
    assert full.raw_rate(0.2) > 10


def test_only_looks_at_the_gpu_count_that_fall_into_the_time_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It idles while the run is planned, begins and is closed."""
    says, looker = tmp_path / "says", tmp_path / "nvidia-smi"
    says.write_text("3\n")
    looker.write_text(f"#!/bin/sh\ncat {says}\n")
    looker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(full, "_LOOK_S", 0.02)

    def planned(changes: Any, seconds: float) -> Pace:
        time.sleep(0.3)
        says.write_text("96\n")
        time.sleep(0.2)
        began = time.perf_counter()
        time.sleep(0.3)
        ended = time.perf_counter()
        says.write_text("3\n")
        time.sleep(0.6)
        return replace(made_up(1.0, 1.0, 1.0), began=began, ended=ended)

    monkeypatch.setattr(full, "planned", planned)
    assert full._gpu(1.0).ours == "96%"
