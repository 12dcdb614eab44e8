"""A learner that has a copy of the replay's observations learns what one learns that is sent them."""

from __future__ import annotations

import pytest
from program_cases import fingerprint, short

import qfleet.api as api
from qfleet.core.errors import ConfigError
from qfleet.core.failpoints import VARIABLE


@pytest.mark.parametrize("sampler", [pytest.param("uniform", marks=pytest.mark.slow), "prioritised"])
def test_the_same_is_learned_with_and_without_a_mirror(sampler, tmp_path):
    """In lock-step, so that both runs draw the same batches; also after a checkpoint."""
    changes = {"placement": "processes", "lockstep": True, "replay.sampler.kind": sampler}
    with_it = api.train(short(**changes, **{"replay.mirror": "on"}), seed=3, run_dir=tmp_path / "on")
    without = api.train(short(**changes, **{"replay.mirror": "off"}), seed=3, run_dir=tmp_path / "off")
    assert with_it.summary["updates"] > 200
    assert fingerprint(with_it)["model"] == fingerprint(without)["model"]


@pytest.mark.parametrize("victim", ["replay-0/worker.step:kill@150", "learner-0/worker.step:kill@150"])
def test_a_run_with_a_mirror_goes_on_after_the_death_of_either_side(victim, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, victim)
    changes = {"placement": "processes", "replay.mirror": "on"}
    run = api.train(short(env_steps=1500, **changes), seed=1, run_dir=tmp_path / "run")
    assert run.summary["env_steps"] >= 1500
    assert '"event": "restart"' in (run.dir / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"placement": "inline"}, "processes"),
        ({"replay.storage.kind": "lz4"}, "replay.storage.kind"),
        ({"replay.capacity": 3000, "learner.train_period": 200.0}, "raise replay.capacity"),
        ({"replay.shards": 2, "actors": 2}, "replay.shards"),
    ],
)
def test_where_there_can_be_no_mirror_it_is_refused_with_the_reason(changes, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        api.train(short(**{"placement": "processes", "replay.mirror": "on", **changes}), run_dir=tmp_path / "run")
