"""All ranks of a group in one process: each runs until it has to wait for the others, then the next one does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from qfleet.core.errors import Deadlock
from qfleet.parallel.group import Group

T = TypeVar("T")


class Turns:
    """Lets ranks take turns in a fixed order, so that what they do is the same every time.

    Each has a thread, since only that can stop in the middle of a call, but one of them runs at a time: until it meets
    the others, or its call has returned. The rest of the process waits meanwhile.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[_Rank] = []
        self._met: list[Any] = []
        """What the ranks brought to their last meeting."""

    def together(self, call: Callable[[int], T], again: Callable[[T], bool] = lambda result: False) -> list[T]:
        """Make a call for each rank, given its number; return what they returned, or raise what the first raised.

        A call that has returned while other ranks wait for this one is made again if its result says that it may.
        """
        self._ranks = going = [_Rank(call, number) for number in range(self.size)]
        try:
            while True:
                for rank in going:
                    rank.run()
                ahead = [rank for rank in self._ranks if rank.returned]
                if len(ahead) == self.size:
                    return [rank.result for rank in ahead]
                for rank in ahead:
                    if not again(rank.result):
                        raise Deadlock(f"rank {rank.number} has ended its turn with {rank.result}; others wait for it")
                if not ahead:
                    self._met = [rank.brought for rank in self._ranks]
                going = ahead or self._ranks
        finally:
            for rank in self._ranks:
                rank.abandon()

    def meet(self, rank: int, brought: Any) -> list[Any]:
        """Wait until all ranks have come; return what each of them brought. For the rank itself to call."""
        self._ranks[rank].wait(brought)
        return self._met


class _Rank:
    """The thread of one rank's calls, which runs only while the rank has its turn."""

    def __init__(self, call: Callable[[int], Any], number: int) -> None:
        self._call, self.number = call, number
        self.returned, self._abandoned = False, False
        self.brought: Any = None
        self.result: Any = None
        self._error: BaseException | None = None
        self._turn, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=f"rank {number}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Let the rank go on, or begin its next call, and wait for the end of its turn; raise what it raised."""
        self._turn.release()
        self._over.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, brought: Any) -> None:
        """End the turn, and wait for the next one. For the rank itself to call."""
        self.brought = brought
        self._over.release()
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End the thread, wherever it waits."""
        self._abandoned = True
        self._turn.release()
        self._thread.join()

    def _main(self) -> None:
        self._turn.acquire()
        try:
            while not self._abandoned:
                self.returned = False
                self.result, self.returned = self._call(self.number), True
                self.wait(None)
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._over.release()


class _Abandoned(BaseException):
    """Ends a rank that others will never come to."""


class TurnGroup(Group):
    """One rank of a group whose ranks take turns. Sums are made in the order of ranks."""

    def __init__(self, rank: int, turns: Turns) -> None:
        self.rank, self.size, self._turns = rank, turns.size, turns

    @property
    def transport(self) -> str:
        """Return that nothing is sent."""
        return "turns"

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Do nothing yet; return what sums, when all other ranks have come to it."""

        def end() -> None:
            first, *others = self._turns.meet(self.rank, tensor.clone())
            tensor.copy_(first)
            for other in others:
                tensor.add_(other)

        return end

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of the tensors of all ranks, in the order of ranks."""
        return [brought.clone() for brought in self._turns.meet(self.rank, tensor.clone())]

    def share(self, data: bytes) -> bytes:
        """Return what rank 0 gave, on every rank."""
        shared: bytes = self._turns.meet(self.rank, data)[0]
        return shared

    def close(self) -> None:
        """Do nothing: a group in one process holds nothing."""
