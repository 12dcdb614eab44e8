"""Comparisons of synthetic runs whose numbers are known beforehand."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qfleet.core.errors import ConfigError, MissingExtra, QfleetError
from qfleet.core.statistics import Estimate
from qfleet.observe.compare import _told_apart, compare
from qfleet.observe.sinks import JsonlSink

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
Points = Sequence[tuple[int, float]]
LINE: Points = [(0, 0.0), (1000, 100.0)]


def make_run(
    directory: Path, points: Points, summary: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> Path:
    """Write a run directory with these evaluations; a summary of None is a run that has not ended."""
    directory.mkdir(parents=True)
    seed = (summary or {}).get("seed", 7)
    (directory / "config.yaml").write_text(yaml.safe_dump({"format": 1, "seed": seed, **(settings or {})}))
    sink = JsonlSink(directory)
    sink.event({"event": "started", "preset": "cartpole", "algo": "dqn", "seed": 7})
    for env_steps, mean in points:
        sink.event({"event": "evaluation", "env_steps": env_steps, "mean": mean, "ci95": [mean, mean], "episodes": 20})
    sink.close()
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps({"preset": "cartpole", "algo": "dqn", **summary}))
    return directory


def test_single_runs_of_different_seeds_form_one_group_with_the_interval_over_seeds(tmp_path: Path) -> None:
    paths = [
        make_run(
            tmp_path / f"run{seed}",
            [(0, 0.0), (500, 50.0 * seed), (1000, 100.0 * seed)],
            {
                "seed": seed, "eval": {"mean": 100.0 * seed}, "env_steps_per_s": 10.0 * seed,
                "env_steps_to_target": 400 * seed if seed < 3 else None,
                "wall_s_to_target": 4.0 * seed if seed < 3 else None,
            },
        )
        for seed in (1, 2, 3)
    ]  # fmt: skip
    (group,) = compare(paths, None).groups
    assert [run.seed for run in group.runs] == [1, 2, 3]
    np.testing.assert_allclose(group.curve.mean, group.curve.env_steps * 0.2)
    assert group.curve.env_steps[[0, -1]].tolist() == [0, 1000]
    assert group.final_mean.value == group.final_iqm.value == 200.0
    # One resample in 27 draws the lowest score three times: more than the 2.5 % of the tail.
    assert group.final_mean == Estimate(200.0, 100.0, 300.0)
    assert (group.curve.low[-1], group.curve.high[-1]) == (100.0, 300.0)
    assert (group.solved, group.env_steps_to_target, group.wall_s_to_target) == (2, 600.0, 6.0)
    assert group.env_steps_per_s == 20.0


def test_two_comparisons_of_the_same_runs_give_the_same_numbers(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / str(i), [(0, i * 1.0), (9, i * 2.0)], {"seed": i}) for i in range(4)]
    assert compare(paths, None).table() == compare(paths, None).table()


def test_evaluations_at_different_steps_are_interpolated_on_a_common_grid(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [(100, 10.0), (1000, 100.0)], {"seed": 1})
    b = make_run(tmp_path / "b", [(300, 60.0), (700, 140.0), (1000, 200.0)], {"seed": 2})
    (group,) = compare([a, b], None).groups
    # Before step 300 one run has not been evaluated: nothing is said of it.
    assert group.curve.env_steps[0] == 300
    np.testing.assert_allclose(group.curve.mean, group.curve.env_steps * 0.15)


def test_a_run_that_stopped_early_counts_with_its_last_score_and_the_curve_says_from_where(tmp_path: Path) -> None:
    short = make_run(tmp_path / "a", [(0, 0.0), (500, 500.0)], {"seed": 1})
    long = make_run(tmp_path / "b", [(0, 0.0), (1000, 100.0)], {"seed": 2})
    (group,) = compare([short, long], None).groups
    assert group.curve.shared_until == 500
    assert group.curve.mean[-1] == 300.0


def test_a_directory_of_seeds_is_one_group_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for seed in (10, 9, 2):
        make_run(tmp_path / "sweep" / f"seed-{seed}", LINE, {"seed": seed})
    (tmp_path / "sweep" / "summary.json").write_text('{"preset": "cartpole", "seeds": 3}')
    single = make_run(tmp_path / "other", LINE, {"seed": 2})
    groups = compare([tmp_path / "sweep", single], None).groups
    assert [[run.seed for run in group.runs] for group in groups] == [[2, 9, 10], [2]]
    assert "sweep" in groups[0].name


def test_runs_that_repeat_a_seed_are_not_taken_for_samples_of_one_thing(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, LINE, {"seed": 1}) for name in ("small-rate", "large-rate")]
    groups = compare(paths, None).groups
    assert [len(group.runs) for group in groups] == [1, 1]
    assert "small-rate" in groups[0].name
    assert "large-rate" in groups[1].name


def test_preset_algorithm_and_label_tell_groups_apart_and_a_path_given_twice_counts_once(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", LINE, {"seed": 1})
    b = make_run(tmp_path / "b", LINE, {"seed": 2, "algo": "rainbow"})
    c = make_run(tmp_path / "c", LINE, {"seed": 3, "preset": "catch"})
    d = make_run(tmp_path / "d", LINE, {"seed": 4, "label": "wide"})
    names = [group.name for group in compare([a, b, c, d, a, d / ".." / "a"], None).groups]
    assert names == ["cartpole dqn", "cartpole rainbow", "catch dqn", "cartpole dqn (wide)"]


def adam(rate: float, **others: Any) -> dict[str, Any]:
    return {"optim": {"lr": rate, "kind": "adam", "betas": [0.9, 0.999]}, **others}


def test_runs_whose_settings_differ_are_not_averaged_and_are_labelled_by_the_difference(tmp_path: Path) -> None:
    cases = {"a": (1, 1e-3), "b": (2, 1e-3), "c": (3, 5e-4), "d": (1, 5e-4)}
    paths = [make_run(tmp_path / name, LINE, {"seed": s}, adam(lr)) for name, (s, lr) in cases.items()]
    groups = compare(paths, None).groups
    assert [(group.name, [run.path.name for run in group.runs]) for group in groups] == [
        ("cartpole dqn (optim.lr=0.001)", ["a", "b"]),
        ("cartpole dqn (optim.lr=0.0005)", ["c", "d"]),
    ]


def test_settings_that_do_not_touch_the_result_do_not_part_runs(tmp_path: Path) -> None:
    others = [
        {"track": {"wandb": ""}, "checkpoint": {"every": 5}},
        {"track": {"wandb": "x"}, "checkpoint": {"every": 9}},
    ]
    paths = [make_run(tmp_path / str(i), LINE, {"seed": i}, adam(1e-3, **other)) for i, other in enumerate(others)]
    (group,) = compare(paths, None).groups
    assert group.name == "cartpole dqn"
    assert len(group.runs) == 2


def test_a_label_names_only_settings_that_it_takes_to_tell_its_group_from_the_others_and_kinds_first(
    tmp_path: Path,
) -> None:
    settings = [
        adam(1e-3, gamma=0.9),
        adam(1e-3, gamma=0.99),
        {"optim": {"lr": 0.1, "kind": "sgd", "momentum": 0.0}, "gamma": 0.9},
    ]
    paths = [make_run(tmp_path / str(i), LINE, {"seed": i}, tree) for i, tree in enumerate(settings)]
    assert [group.name for group in compare(paths, None).groups] == [
        "cartpole dqn (optim.kind=adam, gamma=0.9)",
        "cartpole dqn (optim.kind=adam, gamma=0.99)",
        "cartpole dqn (optim.kind=sgd)",
    ]
    assert [group.name for group in compare(paths[1:], None).groups] == [
        "cartpole dqn (optim.kind=adam)",
        "cartpole dqn (optim.kind=sgd)",
    ]


SETTINGS = st.dictionaries(st.sampled_from(["a", "b", "c.kind", "c.d", "e"]), st.sampled_from("012"), max_size=5)


@given(st.lists(SETTINGS, min_size=1, max_size=8, unique_by=lambda settings: tuple(sorted(settings.items()))))
def test_labels_tell_all_groups_apart(settings: list[dict[str, str]]) -> None:
    labels = _told_apart(settings)
    assert len(set(labels)) == len(labels)
    for label, own in zip(labels, settings, strict=True):
        assert all(own[name] == value for name, value in (part.split("=") for part in label.split(", ") if part))


def test_a_section_that_is_off_is_told_from_one_that_is_on(tmp_path: Path) -> None:
    trees: list[Mapping[str, Any]] = [{"munchausen": None}, {"munchausen": {"alpha": 0.9, "clip": -1.0}}]
    paths = [make_run(tmp_path / str(i), LINE, {"seed": i}, tree) for i, tree in enumerate(trees)]
    assert [group.name for group in compare(paths, None).groups] == [
        "cartpole dqn (munchausen=None)",
        "cartpole dqn (munchausen.alpha=0.9)",
    ]


def test_different_settings_within_a_directory_of_seeds_are_parted_too(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_run(tmp_path / "sweep" / f"seed-{seed}", LINE, {"seed": seed}, adam(1e-3 * (1 + seed // 3)))
    groups = compare([tmp_path / "sweep"], None).groups
    top = tmp_path / "sweep"
    assert [group.name for group in groups] == [
        f"cartpole dqn ({top}, optim.lr=0.001)",
        f"cartpole dqn ({top}, optim.lr=0.002)",
    ]


def test_a_killed_and_resumed_run_counts_the_history_it_kept(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", [(100, 1.0), (200, 2.0), (300, 3.0), (200, 5.0), (300, 6.0)], {"seed": 1})
    (group,) = compare([path], None).groups
    assert group.runs[0].env_steps.tolist() == [100, 200, 300]
    assert group.runs[0].scores.tolist() == [1.0, 5.0, 6.0]


def test_the_table_has_the_final_scores_with_intervals_targets_and_speed(tmp_path: Path) -> None:
    solved = {"eval": {"mean": 480.0}, "env_steps_to_target": 8000, "wall_s_to_target": 65.0, "env_steps_per_s": 9120.0}
    paths = [make_run(tmp_path / f"a{seed}", LINE, {"seed": seed, **solved}) for seed in (1, 2)]
    paths.append(make_run(tmp_path / "b", LINE, {"seed": 1, "algo": "rainbow", "eval": {"mean": 33.0}}))
    lines = compare(paths, None).table().splitlines()
    assert " ".join(lines[2].split()) == "cartpole dqn 2 480 [480, 480] 480 [480, 480] 2/2 8,000 1m05s 9,120"
    # One run has no spread over runs.
    assert " ".join(lines[3].split()) == "cartpole rainbow 1 33 33 0/1 - - -"
    assert len({len(line) for line in lines[:4]}) == 1


def test_a_run_that_goes_on_is_compared_by_its_last_validation_and_marked(tmp_path: Path) -> None:
    comparison = compare([make_run(tmp_path / "a", LINE)], None)
    (run,) = comparison.groups[0].runs
    assert (run.preset, run.seed, run.final_score, run.finished) == ("cartpole", 7, 100.0, False)
    assert "100*" in comparison.table()
    assert "*: with last validation scores" in comparison.table()


def test_the_learning_curves_are_really_written_as_png(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"a{seed}", [(0, 0.0), (500 * seed, 9.0)], {"seed": seed}) for seed in (1, 2)]
    paths.append(make_run(tmp_path / "b", [(5, 1.0)], {"seed": 1, "preset": "catch"}))
    output = tmp_path / "new" / "curves.png"
    assert compare(paths, output).figure == output
    content = output.read_bytes()
    assert content[:8] == PNG_SIGNATURE
    assert len(content) > 10_000
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    # Two presets: two charts, one above the other.
    assert height > width > 500


def test_only_png_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"curves\.pdf"):
        compare([make_run(tmp_path / "a", LINE, {})], tmp_path / "curves.pdf")


def test_without_matplotlib_the_extra_is_named_and_the_table_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = make_run(tmp_path / "a", LINE, {})
    assert compare([path], None).table()
    with pytest.raises(MissingExtra, match=r"qfleet\[plot\]"):
        compare([path], tmp_path / "curves.png")


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare([], None)


def test_missing_or_damaged_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        compare([tmp_path / "absent"], None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty holds no run: there is no config\.yaml in it"):
        compare([tmp_path / "empty"], None)
    early = make_run(tmp_path / "early", LINE)
    (early / "events.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"early holds no run: there is no events\.jsonl in it"):
        compare([early], None)
    for name, text in (("unreadable", "a: [1"), ("scalar", "3"), ("bytes", "\x00")):
        path = make_run(tmp_path / name, LINE, {})
        (path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=rf"{name}/config\.yaml"):
            compare([path], None)
    with pytest.raises(QfleetError, match=r"young/events\.jsonl holds no evaluation"):
        compare([make_run(tmp_path / "young", [], {})], None)
    for name, text in (("torn", '{"preset": "cart'), ("list", "[]")):
        path = make_run(tmp_path / name, LINE, {})
        (path / "summary.json").write_text(text)
        with pytest.raises(QfleetError, match=rf"{name}/summary\.json"):
            compare([path], None)
    with pytest.raises(QfleetError, match=r"nan/events\.jsonl has an evaluation"):
        compare([make_run(tmp_path / "nan", [(0, float("nan"))], {})], None)
    anonymous = tmp_path / "anonymous"
    make_run(anonymous, LINE, {"preset": None})
    with pytest.raises(QfleetError, match=r"anonymous/summary\.json"):
        compare([anonymous], None)
