"""Help pages: the flags of a verb in groups, each with its type, its default and what it does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

from qfleet.cli.settings import REQUIRED, Setting


def help_page(usage: str, about: str, options: Iterable[Setting], settings: Iterable[Setting] = ()) -> str:
    """Return the help of one verb: its own options (booleans are switches), then settings grouped by section."""
    import tyro

    tree: dict[str, Any] = {}
    for setting in options:
        tree[setting.name] = _leaf(setting, tyro.conf.FlagCreatePairsOff)
    for setting in settings:
        *path, last = setting.name.split(".")
        group = tree
        for part in path:
            group = group.setdefault(part, {})
        if not setting.section or setting.default is None:
            group[last] = _leaf(setting, tyro.conf.FlagConversionOff)
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        tyro.cli(_mirror("Flags", tree), prog=usage, description=about, args=["--help"])
    _, *lines = page.getvalue().splitlines()  # tyro's own usage line does not know of positional words
    return "\n".join([f"usage: {usage}", *(line.rstrip() for line in lines)]).rstrip()


def _leaf(setting: Setting, marker: Any) -> tuple[Any, Any]:
    import tyro

    annotated: Any = Annotated
    default = tuple(setting.default) if isinstance(setting.default, list) else setting.default
    return annotated[setting.annotation, tyro.conf.arg(help=setting.help), marker], default


def _mirror(name: str, tree: dict[str, Any]) -> type:
    """Return nested dataclasses with the names, types and defaults of the tree, which is all that tyro looks at."""
    required: list[Any] = []
    optional: list[Any] = []
    for key, entry in tree.items():
        if isinstance(entry, dict):
            required.append((key, _mirror(key, entry)))
        elif entry[1] is REQUIRED:
            required.append((key, entry[0]))
        else:
            optional.append((key, entry[0], dataclasses.field(default_factory=partial(copy.copy, entry[1]))))
    return dataclasses.make_dataclass(name, [*required, *optional], kw_only=True)
