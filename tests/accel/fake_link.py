"""A device whose two queues of work run only when a test lets them, so that whatever comes too early or late shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

COMPUTING, COPYING = 0, 1


class FakeMark:
    def __init__(self, link: FakeLink) -> None:
        self.link, self.passed = link, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.link.run_past(self)


class FakeLink:
    """Work is a function that returns whether it could be done; what waits for a mark holds its queue up."""

    def __init__(self) -> None:
        self.queues: tuple[deque[Callable[[], bool]], ...] = (deque(), deque())
        self.queue = COMPUTING
        self.made = 0
        """Tensors that were allocated on either side."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.made += 1
        return torch.ones(shape).mul(float("nan")).to(dtype)

    device = host

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.queue = COPYING
        yield
        self.queue = COMPUTING

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.do(lambda: target.copy_(source))

    def mark(self) -> FakeMark:
        mark = FakeMark(self)
        self.do(lambda: setattr(mark, "passed", True))
        return mark

    def wait(self, mark: FakeMark) -> None:
        self.queues[self.queue].append(lambda: mark.passed)

    def do(self, work: Callable[[], object]) -> None:
        """Queue work that waits for nothing."""
        self.queues[self.queue].append(lambda: (work(), True)[1])

    def run(self, queue: int, most: int = 10**9) -> int:
        """Do up to so many pieces of work of one queue; return how many were done."""
        done = 0
        while done < most and self.queues[queue] and self.queues[queue][0]():
            self.queues[queue].popleft()
            done += 1
        return done

    def run_past(self, mark: FakeMark) -> None:
        while not mark.passed:
            assert self.run(COMPUTING, 1) or self.run(COPYING, 1), "both queues wait for ever"

    def run_all(self) -> None:
        while self.run(COMPUTING) or self.run(COPYING):
            pass
        assert not any(self.queues)


class HastyLink(FakeLink):
    """Computes at once, as a CPU does, though copies up are as late as can be; what came of it is told `late`.

    `late` is how often the oldest result is asked for in vain.
    """

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self.queue == COPYING:
            super().copy(target, source)
        else:
            target.copy_(source)

    def wait(self, mark: FakeMark) -> None:
        if self.queue == COPYING:
            super().wait(mark)
        else:
            self.run_past(mark)

    def mark(self) -> FakeMark:
        if self.queue == COPYING:
            return super().mark()
        return LateMark(self, self.late)


class LateMark(FakeMark):
    """A mark of work that is done, but not known to be until it was asked for so often."""

    def __init__(self, link: FakeLink, late: int) -> None:
        super().__init__(link)
        self.passed, self.late = True, late

    def query(self) -> bool:
        self.late -= 1
        return self.late < 0
