"""Names the environment in every error of those that Gymnasium's own vectors step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium

from qfleet.envs.faults import raised
from qfleet.envs.loop import Environment
from qfleet.envs.spaces import Layout, Misfit
from qfleet.envs.vector import fault


class Guarded(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks every observation before Gymnasium puts it into a shared array.

    Observations are copied: Gymnasium's SAME_STEP hands out a final observation whose buffer the reset may overwrite.
    """

    def __init__(self, make: Callable[[], Environment], index: int, layout: Layout) -> None:
        super().__init__(make())
        self._index, self._layout = index, layout
        self._episode, self._step = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, with the observation checked."""
        self._episode, self._step = self._episode + 1, 0
        observation, info = self._guard("reset()", lambda: self.env.reset(seed=seed, options=options))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, with the observation checked."""
        observation, reward, ended, stopped, info = self._guard("step()", lambda: self.env.step(action))
        self._step += 1
        return observation, reward, ended, stopped, info

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            result = call()
            self._layout.gather([result[0]])
            return (copy.deepcopy(result[0]), *result[1:])
        except Misfit as misfit:
            raise self._fault(str(misfit)) from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._fault(raised(what, error)) from error

    def _fault(self, what: str) -> Exception:
        return fault(self._layout.spec.name, self._index, what, self._episode, self._step)


def guarded(factories: Sequence[Callable[[], Environment]], layout: Layout) -> list[Callable[[], Environment]]:
    """Return factories of the same environments, guarded."""
    return [partial(Guarded, factory, index, layout) for index, factory in enumerate(factories)]
