"""What actors write down: every transition once, final observations as rows of their own, resets not at all."""

from __future__ import annotations

import dataclasses

import numpy as np

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Version
from qfleet.envs.vector import Tick
from qfleet.roles.acting import Choice
from qfleet.roles.recorder import RolloutRecorder, RowRecorder


def tick(observation: list[float], valid: list[bool], ended: dict[int, float], terminated: bool = True) -> Tick:
    """A tick of scalar observations; `ended` maps environments to their final observation."""
    envs = np.array(sorted(ended), np.int64)
    over = np.isin(np.arange(len(observation)), envs)
    return Tick(
        observation={PLAIN: np.array(observation, np.float32)[:, None]},
        mask=None,
        reward=np.arange(len(observation), dtype=np.float32),
        terminated=over & terminated,
        truncated=over & (not terminated),
        valid=np.array(valid),
        final_observation={PLAIN: np.array([ended[e] for e in envs], np.float32).reshape(-1, 1)},
        final_mask=None,
        finished=envs,
        scores=np.zeros(0),
        score_lengths=np.zeros(0, np.int64),
        scored=np.zeros(0, np.int64),
    )


def chosen(*actions: int, **extras: np.ndarray) -> Choice:
    return Choice(np.array(actions), np.zeros((len(actions), 2), np.float32), extras)


SPEC = EnvSpec(name="toy", observations={PLAIN: LeafSpec(shape=(1,), dtype="float32")}, actions=2)


def test_rows_carry_what_was_seen_before_and_what_came_after():
    recorder = RowRecorder(SPEC, "actor-1", first_stream=4)
    before = {PLAIN: np.array([[1.0], [2.0]], np.float32)}
    recorder.add(before, None, chosen(1, 0), tick([9.0, 3.0], [True, True], {0: 5.0}))
    message = recorder.message(Version(0, 7))
    assert message.stream.tolist() == [4, 5, 4]
    assert message.observation[PLAIN].ravel().tolist() == [1.0, 2.0, 5.0]
    assert message.final.tolist() == [False, False, True]
    assert message.terminated.tolist() == [True, False, False]
    assert message.offsets.tolist() == [0, 2, 3]
    assert (message.source, message.sequence, message.version) == ("actor-1", 0, Version(0, 7))


def test_extras_go_with_their_rows_and_are_zero_in_final_ones():
    recorder = RowRecorder(SPEC, "actor-0", first_stream=0)
    before, state = {PLAIN: np.zeros((3, 1), np.float32)}, np.array([[1, 2], [3, 4], [5, 6]], np.float16)
    recorder.add(before, None, chosen(0, 0, 0, state=state), tick([0, 0, 0], [True, False, True], {2: 1.0}))
    found = recorder.message(Version()).extras["state"]
    assert found.tolist() == [[1, 2], [5, 6], [0, 0]]
    assert found.dtype == np.float16


def test_trap_5_a_tick_that_only_reset_an_environment_is_no_row():
    recorder = RowRecorder(SPEC, "actor-0", first_stream=0)
    before = {PLAIN: np.array([[1.0], [2.0]], np.float32)}
    recorder.add(before, None, chosen(1, 0), tick([1.5, 3.0], [False, True], {}))
    assert recorder.message(Version()).stream.tolist() == [1]


def test_messages_are_numbered_and_cuts_are_sent_once():
    recorder = RowRecorder(SPEC, "actor-0", first_stream=10)
    recorder.cut(np.array([1]))
    for expected_cut, number in (([11], 0), ([], 1)):
        recorder.add({PLAIN: np.zeros((2, 1), np.float32)}, None, chosen(0, 0), tick([0, 0], [True, True], {}))
        message = recorder.message(Version())
        assert (message.cut.tolist(), message.sequence) == (expected_cut, number)


def test_only_the_newest_frame_of_a_stack_is_sent():
    leaf = LeafSpec(shape=(3, 2), dtype="float32", stack=3)
    recorder = RowRecorder(EnvSpec(name="toy", observations={PLAIN: leaf}, actions=2), "actor-0", 0)
    stacks = np.arange(6, dtype=np.float32).reshape(1, 3, 2)
    ended = Tick(**{**tick([0.0], [True], {0: 1.0}).__dict__, "final_observation": {PLAIN: stacks + 10}})
    recorder.add({PLAIN: stacks}, None, chosen(0), ended)
    message = recorder.message(Version())
    assert message.observation[PLAIN].tolist() == [[4.0, 5.0], [14.0, 15.0]]


def test_a_rollout_has_one_more_observation_than_ticks_and_names_its_finals():
    recorder = RolloutRecorder()
    seen = [{PLAIN: np.full((2, 1), t, np.float32)} for t in range(2)]
    recorder.add(seen[0], None, chosen(0, 1), tick([1.0, 1.0], [True, True], {}))
    recorder.add(seen[1], None, chosen(1, 1), tick([2.0, 7.0], [True, False], {0: 8.0}, terminated=False))
    rollout = recorder.message(Version(0, 3))
    assert rollout.observation[PLAIN][:, 1, 0].tolist() == [0.0, 1.0, 7.0]
    assert rollout.action.tolist() == [[0, 1], [1, 1]]
    assert rollout.final_at.tolist() == [[1, 0]]
    assert rollout.final_observation[PLAIN].tolist() == [[8.0]]
    assert rollout.truncated.tolist() == [[False, False], [True, False]]
    assert rollout.valid.tolist() == [[True, True], [True, False]]


def test_rows_carry_the_values_that_they_were_chosen_by():
    recorder = RowRecorder(SPEC, "actor-0", first_stream=0, valued=True)
    seen, mask = {PLAIN: np.zeros((3, 1), np.float32)}, np.array([[True, True], [True, False], [True, True]])
    q = np.array([[1, 2], [3, 9], [5, 4]], np.float32)
    choice = Choice(np.array([0, 0, 1]), q, {})
    ending = tick([0, 0, 0], [True, True, False], {1: 1.0}, terminated=False)
    recorder.add(seen, mask, choice, dataclasses.replace(ending, final_mask=mask[:1]))
    message = recorder.message(Version())
    assert message.value.tolist() == [1, 3, 0]
    assert message.best.tolist() == [2, 3, 3]  # only what is allowed; a final row repeats the last one of its episode
    assert message.best.dtype == message.value.dtype == np.float32
