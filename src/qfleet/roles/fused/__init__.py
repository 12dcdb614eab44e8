"""The fused topology: environments, policy, replay and update on one device, in one loop."""

from qfleet.roles.fused.role import Fused, FusedHandles
from qfleet.roles.fused.setup import FusedSetup

__all__ = ["Fused", "FusedHandles", "FusedSetup"]
