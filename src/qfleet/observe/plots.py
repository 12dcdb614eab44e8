"""Draws learning curves with intervals into a PNG (extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.core.errors import ConfigError, MissingExtra, QfleetError

if TYPE_CHECKING:
    from qfleet.observe.compare import Group


def draw_curves(groups: Sequence[Group], output: Path) -> None:
    """Write one picture: a chart for each preset, a line with its band for each group."""
    if output.suffix.lower() != ".png":
        raise ConfigError(f"the learning curves are written as PNG; '{output}' should end in .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "drawing learning curves") from error
    presets = list(dict.fromkeys(group.preset for group in groups))
    figure = Figure(figsize=(7.5, 4.2 * len(presets)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, preset in zip(figure.subplots(len(presets), squeeze=False)[:, 0], presets, strict=True):
        _draw_chart(axes, preset, [group for group in groups if group.preset == preset])
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, format="png")
    except OSError as error:
        raise QfleetError(f"cannot write {output}: {error.strerror}") from error


def _draw_chart(axes: Any, preset: str, groups: Sequence[Group]) -> None:
    for number, group in enumerate(groups):
        curve, color = group.curve, f"C{number % 10}"
        shared = curve.env_steps <= curve.shared_until
        label = f"{group.name}, {len(group.runs)} run{'s' if len(group.runs) > 1 else ''}"
        # Dashed where some of the runs have ended and count with their last score.
        axes.plot(curve.env_steps, curve.mean, color=color, linestyle="--", linewidth=1)
        marker = "o" if shared.sum() == 1 else None
        axes.plot(curve.env_steps[shared], curve.mean[shared], color=color, linewidth=1.8, label=label, marker=marker)
        axes.fill_between(curve.env_steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
    axes.set_title(preset)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("evaluation score, mean and 95 % interval over runs")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
