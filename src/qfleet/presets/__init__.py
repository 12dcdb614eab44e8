"""Ready experiments: each preset is a function that returns a complete one."""

from qfleet.presets.registry import preset

__all__ = ["preset"]
