"""The experience replay: segments, windows, samplers, storage tiers, and the limiter of samples per insert."""

from qfleet.replay.buffer import Replay, ReplayConfig
from qfleet.replay.ratelimit import RateLimiter
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig
from qfleet.replay.storage import Lz4Config, MappedConfig, RamConfig
from qfleet.replay.windows import SequenceWindow

__all__ = [
    "Lz4Config", "MappedConfig", "PrioritisedConfig", "RamConfig", "RateLimiter", "Replay", "ReplayConfig",
    "SequenceWindow", "UniformConfig",
]  # fmt: skip
