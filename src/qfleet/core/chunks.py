"""Parts of a state that are written once: a later checkpoint names what an earlier one has written already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qfleet.core.role import State


@dataclass(eq=False)
class Chunk:
    """A part of a state with a file of its own; stands in the state where its content would."""

    read: Callable[[], State]
    """Returns the content: of a role's own chunk that of the moment when the state was taken, of a saved one what its
    file holds."""
    name: str | None = None
    """The name of the file that holds the content; None if there is none yet."""
    dropped: bool = False
    """Whether the state that it belongs to will not be written any further."""
    retake: Callable[[], None] | None = None
    """Called when the state is taken and its file is gone: its content is kept again. None where it always can be."""

    @property
    def awaited(self) -> bool:
        """Whether its content may still be read by whoever writes the state."""
        return self.name is None and not self.dropped
