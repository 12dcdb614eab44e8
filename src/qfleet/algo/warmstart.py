"""Starts a network from the tensors of another one, as far as they fit, and reports what did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qfleet.core.errors import ConfigError

_PREFIX = {"all": "", "torso": "torso."}


@dataclass(frozen=True)
class WarmStartReport:
    """What became of each tensor that was asked for; `str()` is meant for people."""

    matched: tuple[str, ...]
    """Copied."""
    missing: tuple[str, ...]
    """In the network, not in the model: left as initialised."""
    wrong_shape: tuple[str, ...]
    """In both, with different shapes, as "name: [4, 64] in the model, [4, 128] in the network": left as initialised."""
    unused: tuple[str, ...]
    """In the model, not in the network."""

    def __str__(self) -> str:
        total = len(self.matched) + len(self.missing) + len(self.wrong_shape)
        lines = [f"warm start: {len(self.matched)} of {total} tensors copied"]
        for title, names in (
            ("not in the model", self.missing),
            ("wrong shape", self.wrong_shape),
            ("not in the network", self.unused),
        ):
            if names:
                lines.append(f"  {title}: {', '.join(names)}")
        return "\n".join(lines)


def warm_start(network: nn.Module, tensors: Mapping[str, Tensor], part: Literal["all", "torso"]) -> WarmStartReport:
    """Copy into `network`, in place, each tensor whose name and shape match; "torso" takes only names under `torso.`.

    Raises ConfigError when nothing matches; then the network is unchanged.
    """
    prefix = _PREFIX[part]
    own = {name: tensor for name, tensor in network.state_dict().items() if name.startswith(prefix)}
    given = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    common = [name for name in own if name in given]
    matched = [name for name in common if own[name].shape == given[name].shape]
    report = WarmStartReport(
        matched=tuple(matched),
        missing=tuple(name for name in own if name not in given),
        wrong_shape=tuple(
            f"{name}: {list(given[name].shape)} in the model, {list(own[name].shape)} in the network"
            for name in common
            if name not in matched
        ),
        unused=tuple(name for name in given if name not in own),
    )
    if not matched:
        raise ConfigError(
            f"nothing in the model fits the network (part '{part}'), so there is nothing to start from;"
            f" choose a model with the same network settings.\n{report}"
        )
    with torch.no_grad():
        for name in matched:
            own[name].copy_(given[name])
    return report
