"""Checkpoints on disk: whole or absent, and never loaded when anything about them is wrong."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.errors import CheckpointError
from qfleet.runtime import captured, checkpoint
from qfleet.runtime.epochs import Epoch


def save(root: Path, env_steps: int, keep: int = 10) -> Path:
    state = {"weights": np.arange(100, dtype=np.float32) + env_steps, "count": env_steps, "name": "x", "none": None}
    epoch = Epoch.begin(root)
    partial = checkpoint.begin(epoch, env_steps)
    return checkpoint.save(
        epoch, partial, lambda: checkpoint.write_state(partial, "learner-0", state), {"mood": 1}, keep
    )


def test_states_come_back_as_they_were(tmp_path):
    state = {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.int64),
        "transposed": np.arange(6).reshape(2, 3).T,
        "flags": np.array([True, False]),
        "tensor": torch.arange(4, dtype=torch.bfloat16),
        "nested": {"list": [1, (2, None)], "rng": np.random.default_rng(1).bit_generator.state},
        3: "integer key",
    }
    checkpoint.write_state(tmp_path, "role", state)
    found = checkpoint.read_state(tmp_path, "role")
    assert found.keys() == state.keys()
    for name in ("scalar", "empty", "transposed", "flags"):
        assert found[name].shape == state[name].shape
        assert np.array_equal(found[name], state[name])
    assert torch.equal(found["tensor"], state["tensor"])
    assert found["nested"] == state["nested"]


def test_the_newest_complete_one_wins_and_old_ones_go(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=2)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["000000000020", "000000000030"]
    found = checkpoint.newest_good(tmp_path)
    assert (found.directory.name, found.manifest["mood"], found.skipped) == ("000000000030", 1, [])


def test_one_that_was_being_written_is_never_seen(tmp_path):
    save(tmp_path, 10)
    epoch = Epoch.begin(tmp_path)
    partial = checkpoint.begin(epoch, 20)

    def interrupted() -> None:
        checkpoint.write_state(partial, "learner-0", {"weights": np.ones(3)})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(epoch, partial, interrupted, {}, 5)
    assert checkpoint.newest_good(tmp_path).directory.name == "000000000010"
    save(tmp_path, 20)
    assert checkpoint.newest_good(tmp_path).directory.name == "000000000020"


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_or_lost_byte_is_noticed_named_and_skipped(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("checkpoints")
    save(root, 10)
    newest = save(root, 20)
    victim = data.draw(st.sampled_from(sorted(p.name for p in newest.iterdir())))
    before = (newest / victim).read_bytes()
    content = bytearray(before)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (newest / victim).write_bytes(bytes(content))
    found = checkpoint.newest_good(root)
    assert found.directory.name == "000000000010"
    assert str(newest / victim) in found.skipped[0]
    checkpoint.set_aside(found, Epoch.begin(root))
    assert [path.name for path in checkpoint.complete(root)] == ["000000000010"]


@pytest.mark.parametrize("number", [1e-05, 0.30000000000000004])
def test_a_manifest_in_other_words_is_damaged_even_if_it_means_the_same(tmp_path, number):
    epoch = Epoch.begin(tmp_path)
    partial = checkpoint.begin(epoch, 1)
    checkpoint.save(epoch, partial, lambda: checkpoint.write_state(partial, "role", {}), {"seconds": number}, 2)
    path = tmp_path / "000000000001" / checkpoint.MANIFEST
    text = path.read_text()
    checkpoint.verify(path.parent)
    for same in (text.replace("1e-05", "1E-05"), text.replace("0000004", "0000005"), f"{text} "):
        assert same == text or json.loads(same) == json.loads(text)
        path.write_text(same)
        if same != text:
            with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
                checkpoint.verify(path.parent)


@pytest.mark.parametrize("victim", [checkpoint.MANIFEST, "learner-0.msgpack", "learner-0.safetensors"])
def test_a_file_that_is_gone_or_cannot_be_read_is_named(tmp_path, victim):
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    (newest / victim).unlink()
    assert str(newest / victim) in checkpoint.newest_good(tmp_path).skipped[0]
    (newest / victim).mkdir()
    found = checkpoint.newest_good(tmp_path)
    assert f"{newest / victim}: cannot be read" in found.skipped[0]
    checkpoint.set_aside(found, Epoch.begin(tmp_path))
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["000000000010"]


def test_a_second_checkpoint_of_the_same_step_overwrites_nothing_and_wins(tmp_path):
    names = [save(tmp_path, 10).name for _ in range(12)]
    assert len(set(names)) == 12
    assert names == sorted(names)
    assert checkpoint.newest_good(tmp_path).directory.name == names[-1]
    assert names[-1] < save(tmp_path, 11).name


def test_files_that_the_manifest_does_not_know_are_refused(tmp_path):
    newest = save(tmp_path, 5)
    (newest / "actor-7.msgpack").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="actor-7"):
        checkpoint.verify(newest)


def test_a_full_disk_is_one_error_and_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 5)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(captured, "save_file", full)
    with pytest.raises(CheckpointError, match="room on the disk"):
        save(tmp_path, 6)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".epoch-")] == ["000000000005"]
    assert [path.name for path in tmp_path.glob(".epoch-*/*")] == ["owner"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "not a qfleet manifest"),
        ('{"format": 99, "files": {}, "env_steps": 1}', "format 99"),
        ("\x00", "not a qfleet"),
    ],
)
def test_foreign_files_are_refused(tmp_path, text, complaint):
    directory = tmp_path / "000000000005"
    directory.mkdir()
    (directory / checkpoint.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=complaint):
        checkpoint.newest_good(tmp_path)


def test_a_manifest_cannot_name_files_outside_its_directory(tmp_path):
    (tmp_path / "secret").write_text("x")
    newest = save(tmp_path / "root", 5)
    manifest = json.loads((newest / checkpoint.MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"]["../../secret"] = "0" * 64
    signed = {**manifest, "sha256": hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()}
    (newest / checkpoint.MANIFEST).write_text(json.dumps(signed, indent=1))
    with pytest.raises(CheckpointError, match="missing from the checkpoint"):
        checkpoint.verify(newest)


def test_no_code_in_a_state_is_run(tmp_path):
    """What would be a bomb for pickle is just an unreadable file here."""
    (tmp_path / "role.msgpack").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "bomb").encode() + b"'\ntR.")
    (tmp_path / "role.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError):
        checkpoint.read_state(tmp_path, "role")
    assert not (tmp_path / "bomb").exists()


def test_what_is_not_data_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match="is not data"):
        checkpoint.write_state(tmp_path, "role", {"function": os.system})
    with pytest.raises(TypeError, match="object array"):
        checkpoint.write_state(tmp_path, "role", {"objects": np.array([object()])})
