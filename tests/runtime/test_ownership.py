"""Who may use a run's directory: the living keep it, the dead lose it, on this machine and on others."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import pytest

from qfleet.core.errors import ConfigError
from qfleet.runtime import ownership
from qfleet.runtime.epochs import Epoch
from qfleet.runtime.ownership import LOCK, SILENT_S, Owner, Ownership, Sight, look, request_end, request_scale
from qfleet.runtime.rundir import RunDir

HERE = socket.gethostname()


def nobody(by: str) -> bool:
    raise AssertionError(f"{by} asked")


def hearing(heard: list[dict[str, object]]) -> Callable[[dict[str, object]], bool]:
    """Return what hears requests for other numbers and notes them."""

    def hear(wish: dict[str, object]) -> bool:
        heard.append(wish)
        return True

    return hear


def beats(run: Path, number: int = 2) -> None:
    """Wait until an owner has looked for requests; one of the looks may have begun before."""
    for _ in range(number):
        before = (run / LOCK).stat().st_mtime_ns
        _wait_until(lambda before=before: (run / LOCK).stat().st_mtime_ns > before)


def leave_record(run: Path, host: str, silent_s: float, until: float | None = None) -> None:
    """Leave what an owner on some machine leaves that did not give its directory back."""
    record = Owner("ann", host, 4711, since=1e9, until=until)
    (run / LOCK).write_text(json.dumps(asdict(record)) + "\n")
    os.utime(run / LOCK, (time.time() - silent_s,) * 2)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BEAT_S", 0.01)


def test_an_owner_is_seen_while_it_owns_and_remembered_after(tmp_path: Path) -> None:
    own = Ownership.acquire(tmp_path, nobody)
    sight = look(tmp_path)
    assert (sight.alive, sight.locked, sight.doubt) == (True, True, "")
    assert sight.owner is not None
    assert (sight.owner.host, sight.owner.pid, sight.owner.until) == (HERE, os.getpid(), None)
    own.release("it broke")
    after = look(tmp_path)
    assert (after.alive, after.locked, after.doubt) == (False, False, "")
    assert after.owner is not None
    assert after.owner.ending == "it broke"
    assert after.owner.until is not None
    assert after.owner.until >= after.owner.since == sight.owner.since


def test_a_directory_that_somebody_owns_is_refused_with_the_name(tmp_path: Path) -> None:
    own = Ownership.acquire(tmp_path, nobody)
    with pytest.raises(ConfigError, match=rf"in use by .*@{HERE} \(process {os.getpid()}, since .*qfleet stop"):
        Ownership.acquire(tmp_path, nobody)
    own.release()
    Ownership.acquire(tmp_path, nobody).release()


def test_looking_at_a_directory_does_not_keep_others_from_taking_it(tmp_path: Path) -> None:
    Ownership.acquire(tmp_path, nobody).release()
    looking = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `look` does
    timer = threading.Timer(0.1, os.close, [looking])
    timer.start()
    Ownership.acquire(tmp_path, nobody).release()
    timer.join()


@pytest.mark.parametrize("silent_s", [0.0, 5.0, SILENT_S + 5.0])
def test_an_owner_that_died_on_this_machine_loses_the_directory_at_once(silent_s: float, tmp_path: Path) -> None:
    leave_record(tmp_path, HERE, silent_s)
    assert not look(tmp_path).alive
    Ownership.acquire(tmp_path, nobody).release()


@pytest.mark.usefixtures("quick")
def test_an_owner_on_another_machine_whose_lock_is_not_seen_is_believed_its_signs_of_life(tmp_path: Path) -> None:
    leave_record(tmp_path, "elsewhere", silent_s=7.0)
    sight = look(tmp_path)
    assert (sight.alive, sight.locked) == (True, False)
    assert "last sign of life 7 s ago" in sight.doubt
    with pytest.raises(ConfigError, match=r"in use by ann@elsewhere \(process 4711.*free after 60 s of silence"):
        Ownership.acquire(tmp_path, nobody)
    leave_record(tmp_path, "elsewhere", silent_s=SILENT_S + 1)
    assert "only elsewhere knows for certain" in look(tmp_path).doubt
    Ownership.acquire(tmp_path, nobody).release()


def test_what_was_given_back_on_another_machine_is_free_at_once(tmp_path: Path) -> None:
    leave_record(tmp_path, "elsewhere", silent_s=0.0, until=time.time())
    assert look(tmp_path).doubt == ""
    Ownership.acquire(tmp_path, nobody).release()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("off_s", [-5 * 3600.0, 5 * 3600.0])
def test_an_owner_whose_clock_is_hours_off_keeps_its_directory_as_long_as_it_gives_signs(
    off_s: float, tmp_path: Path
) -> None:
    leave_record(tmp_path, "elsewhere", silent_s=-off_s)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.01):
            os.utime(tmp_path / LOCK, (time.time() + off_s,) * 2)

    beats = threading.Thread(target=beat)
    beats.start()
    try:
        with pytest.raises(ConfigError, match="in use by ann@elsewhere"):
            Ownership.acquire(tmp_path, nobody)
    finally:
        over.set()
        beats.join()
    Ownership.acquire(tmp_path, nobody).release()  # a time that is yet to come keeps nobody out


@pytest.mark.usefixtures("no_locks", "quick")
def test_on_a_disk_without_locks_signs_of_life_decide(tmp_path: Path) -> None:
    own = Ownership.acquire(tmp_path, nobody)
    assert look(tmp_path).locked is None
    with pytest.raises(ConfigError, match="in use by"):
        Ownership.acquire(tmp_path, nobody)
    own.release()
    leave_record(tmp_path, HERE, silent_s=SILENT_S + 1)
    Ownership.acquire(tmp_path, nobody).release()


@pytest.mark.parametrize("content", ["", "1234\n", "[1]\n", '{"user": "ann"}\n', '{"user": "an'])
def test_the_lock_of_an_older_version_and_a_torn_one_name_nobody_and_are_taken(content: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(content)
    assert look(tmp_path).owner is None
    Ownership.acquire(tmp_path, nobody).release()


def test_a_driver_that_is_suspended_is_alive_with_a_doubt() -> None:
    sight = Sight(Owner("ann", HERE, 1, 1e9), locked=True, silent_s=300.0)
    assert sight.alive
    assert "300 s" in sight.doubt
    assert "suspended" in sight.doubt


@pytest.mark.usefixtures("quick")
def test_signs_of_life_come_and_a_request_is_told_until_it_is_heard(tmp_path: Path) -> None:
    heard: list[str] = []

    def hear(by: str) -> bool:
        heard.append(by)
        return len(heard) > 1  # deaf the first time

    (tmp_path / ".request").write_text("somebody, in an earlier life\n")
    own = Ownership.acquire(tmp_path, hear)
    os.utime(tmp_path / LOCK, (1e9, 1e9))
    _wait_until(lambda: look(tmp_path).silent_s < 60)
    assert heard == []
    request_end(tmp_path)
    _wait_until(lambda: len(heard) > 1)
    for _ in range(2):  # each of which may be when it was heard
        before = (tmp_path / LOCK).stat().st_mtime_ns
        _wait_until(lambda before=before: (tmp_path / LOCK).stat().st_mtime_ns > before)
    assert len(heard) == 2, "once it was heard it is not told again"
    request_end(tmp_path)
    _wait_until(lambda: len(heard) > 2)  # but another one is: the first may have been lost on its way to the run
    own.release()
    assert heard == [f"{ownership._user()}@{HERE}"] * 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("earlier", [False, True])
def test_a_request_as_soon_as_somebody_has_the_lock_is_not_lost(
    earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was emptied with what was left of former owners, and whoever had asked waited for a minute."""
    write = ownership._write

    def seen_meanwhile(descriptor: int, owner: Owner) -> None:
        if look(tmp_path).alive and not asked:
            asked.append(True)
            request_end(tmp_path)
        write(descriptor, owner)

    def hear(by: str) -> bool:
        heard.append(by)
        return True

    asked: list[bool] = []
    heard: list[str] = []
    if earlier:
        (tmp_path / ownership.REQUEST).write_text("somebody, in an earlier life\n")
        os.utime(tmp_path / ownership.REQUEST, (1e9, 1e9))
    monkeypatch.setattr(ownership, "_write", seen_meanwhile)
    own = Ownership.acquire(tmp_path, hear)
    _wait_until(lambda: bool(heard))
    own.release()
    assert heard == [f"{ownership._user()}@{HERE}"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("place", ["acquire", "epoch", "leave"])
def test_an_interrupt_while_a_directory_is_taken_or_given_back_does_not_keep_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"acquire": (Ownership, "_begin"), "epoch": (Epoch, "begin"), "leave": (Ownership, "_give_back")}[place]
    real = getattr(*where)

    def cut(*arguments: object) -> object:
        result = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(*where, cut)
    with pytest.raises(KeyboardInterrupt), RunDir.create(tmp_path / "run"):
        assert place == "leave"
    assert not look(tmp_path / "run").alive
    monkeypatch.undo()
    with RunDir.create(tmp_path / "run"):
        assert look(tmp_path / "run").alive


@pytest.mark.usefixtures("quick")
def test_a_request_waits_where_the_caller_has_a_handler_of_its_own(tmp_path: Path) -> None:
    """asyncio's handler raises something later, somewhere else: the run went on, and its caller was cancelled."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    heard = threading.Event()
    try:
        with RunDir.create(tmp_path / "run") as run:
            request_end(tmp_path / "run")
            beats(tmp_path / "run", 3)
            assert (came, run.ended_by) == ([], f"{ownership._user()}@{HERE}")
            run.end = lambda: heard.set() is None
            assert heard.wait(30), "who can heed it is told of it then"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("quick")
def test_requests_for_other_numbers_are_passed_on_once_each_and_nonsense_is_not(tmp_path: Path) -> None:
    heard: list[dict[str, object]] = []
    own = Ownership.acquire(tmp_path, nobody, hearing(heard))
    folder = tmp_path / ownership.SCALE
    try:
        too_long = json.dumps({"id": "7", "by": "x" * 2000, "actors": 3})
        for number, text in enumerate(
            (b"no request\n", b"[1, 2]\n", b"3\n", b'{"id": "cut off', b"\xff", b"[" * 1024, too_long.encode())
        ):
            (folder / f"{number}.json").write_bytes(text)
        (folder / "7.json").symlink_to(tmp_path / LOCK)
        (folder / "8.json").mkdir()
        os.mkfifo(folder / "9.json")
        first = request_scale(tmp_path, 3, None)
        _wait_until(lambda: len(heard) == 1)
        second = request_scale(tmp_path, None, 2)
        _wait_until(lambda: len(heard) == 2)
    finally:
        own.release()
    assert [(one["id"], one["actors"], one["learners"]) for one in heard] == [(first, 3, None), (second, None, 2)]
    assert {one["by"] for one in heard} == {f"{ownership._user()}@{HERE}"}
    assert {place.name for place in folder.iterdir()} == {"7.json", "8.json", "9.json"}, "the rest was removed"


@pytest.mark.usefixtures("quick")
def test_of_requests_in_quick_succession_each_is_passed_on_in_their_order(tmp_path: Path) -> None:
    """There was one file for all, and the driver looks once a second: the last one won."""
    heard: list[dict[str, object]] = []
    own = Ownership.acquire(tmp_path, nobody, hearing(heard))
    try:
        asked = [request_scale(tmp_path, actors) for actors in range(1, 101)]
        _wait_until(lambda: len(heard) >= 100)
        beats(tmp_path)
    finally:
        own.release()
    assert [one["id"] for one in heard] == asked
    assert list((tmp_path / ownership.SCALE).iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_requests_wait_until_somebody_hears_them(tmp_path: Path) -> None:
    """Those that came while a run was still being built were taken for told, and never answered."""
    heard: list[dict[str, object]] = []
    with RunDir(tmp_path) as run:
        run.end = lambda: True
        asked = [request_scale(tmp_path, 3), request_scale(tmp_path, 4)]
        beats(tmp_path)
        assert len(list((tmp_path / ownership.SCALE).iterdir())) == 2
        run.wished = hearing(heard)
        _wait_until(lambda: len(heard) == 2)
    assert [one["id"] for one in heard] == asked


@pytest.mark.usefixtures("quick")
def test_a_request_that_cannot_be_removed_is_passed_on_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    heard: list[dict[str, object]] = []
    own = Ownership.acquire(tmp_path, nobody, hearing(heard))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refuse)
            request_scale(tmp_path, 3)
            _wait_until(lambda: len(heard) == 1)
            beats(tmp_path, 3)
    finally:
        own.release()
    assert len(heard) == 1


def test_requests_to_an_earlier_owner_are_not_heard_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ownership.SCALE).write_text("")  # as in earlier versions
    Ownership.acquire(tmp_path, nobody).release()
    request_scale(tmp_path, 3)
    (tmp_path / ownership.SCALE / "half.partial").write_text("{")
    Ownership.acquire(tmp_path, nobody).release()
    assert list((tmp_path / ownership.SCALE).iterdir()) == []


def test_a_run_whose_requests_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.scale cannot be written .*cannot be asked to scale it"):
        request_scale(tmp_path, 3)


@pytest.mark.usefixtures("quick")
def test_a_request_that_is_no_text_leaves_the_signs_of_life_going(tmp_path: Path) -> None:
    """The thread that gives them died of it, and the run looked dead."""
    own = Ownership.acquire(tmp_path, lambda by: True)
    try:
        (tmp_path / ownership.REQUEST).write_bytes(b"\xff\xfe")
        beats(tmp_path, 3)
    finally:
        own.release()


@pytest.fixture
def heeding() -> Iterator[None]:
    """Ctrl-C as a terminal's programs know it, whoever has started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding")
def test_a_request_that_ctrl_c_would_not_reach_is_not_taken_for_heeded():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert not ownership.interrupt_main_thread()


@pytest.mark.usefixtures("quick", "heeding")
def test_a_request_is_a_ctrl_c_to_whoever_uses_a_run_in_the_main_thread(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def use() -> None:
        with run:
            request_end(tmp_path)
            time.sleep(30)  # a system call that the signal must cut short

    with pytest.raises(KeyboardInterrupt):
        use()
    assert run.ended_by.endswith(f"@{HERE}")
    owner = look(tmp_path).owner
    assert owner is not None
    assert owner.ending == ownership.INTERRUPTED


def test_a_run_of_another_user_cannot_be_asked_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / ".request").mkdir()  # what root, too, cannot write
    with pytest.raises(ConfigError, match=r"\.request cannot be written .*cannot be asked"):
        request_end(tmp_path)


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> NoReturn:
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert ownership._user() == str(os.getuid())


RACER = """
import sys, time
from pathlib import Path
from qfleet.core.errors import ConfigError
from qfleet.runtime.ownership import Ownership
print("ready", flush=True)
sys.stdin.readline()
try:
    Ownership.acquire(Path(sys.argv[1]), print)
except ConfigError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
    sys.stdin.readline()
"""


def test_of_several_that_want_a_directory_at_the_same_moment_one_gets_it(tmp_path: Path) -> None:
    leave_record(tmp_path, HERE, silent_s=5.0)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        lines = [(racer.stdin, racer.stdout) for racer in racers]
        assert [out.readline() for _, out in lines if out] == ["ready\n"] * 4
        for into, _ in lines:
            assert into is not None
            into.write("go\n")
            into.flush()
        assert sorted(out.readline() for _, out in lines if out) == ["refused\n"] * 3 + ["taken\n"]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def _wait_until(moment: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not moment():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_who_forgoes_a_directory_leaves_it_to_those_who_had_it_before(tmp_path: Path) -> None:
    """A resume that was refused was a sign of life of an owner that is dead."""
    Ownership.acquire(tmp_path, nobody).release("the disk is gone")
    long_ago = time.time() - 1000
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    before = look(tmp_path).owner
    Ownership.acquire(tmp_path, nobody).forgo("no such device")
    assert look(tmp_path).owner == before
    assert (tmp_path / LOCK).stat().st_mtime == pytest.approx(long_ago, abs=0.01)


def test_where_nobody_was_before_it_is_told_why_a_directory_was_forgone(tmp_path: Path) -> None:
    Ownership.acquire(tmp_path, nobody).forgo("no such device")
    owner = look(tmp_path).owner
    assert owner is not None
    assert (owner.until is not None, owner.ending) == (True, "no such device")
