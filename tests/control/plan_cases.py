"""Machines and measurements that do not exist, for tests of what is decided on them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from qfleet.control.measurements import LearnerCost, Measurements
from qfleet.control.resources import Gpu, Resources
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset

US = 1e-6
GIB = 2**30


def experiment(**changes: Any) -> Experiment:
    """Return an ordinary environment in processes: 16 environments an actor, 200,000 steps."""
    return with_changes(preset("mountaincar"), {"placement": "processes", **changes})


def resources(
    cores: float = 8, memory: int = 32 * GIB, shared_memory: int = 32 * GIB, gpu: str = "", gpus: int = 1
) -> Resources:
    """Return a machine; with a `gpu` it has so many of that name."""
    found = (Gpu(name=gpu, memory=80 * GIB),) * gpus if gpu else ()
    return Resources(cpu="test", cores=cores, memory=memory, shared_memory=shared_memory, gpus=found)


def measurements(
    env: float = 20 * US,
    act: float = 5 * US,
    replay: float = 5 * US,
    learner: float = 50 * US,
    message: float = 80 * US,
    **changes: Any,
) -> Measurements:
    """Return costs for each environment step (`message`: for each message) that grow in step with the environments."""

    def curve(each: float, once: float = 0.0) -> tuple[tuple[int, float], ...]:
        return tuple((size, once + size * each) for size in (4, 16, 64))

    found = Measurements(
        env_tick=curve(env),
        act=curve(act),
        request_message=curve(0.0, message),
        actor_tick=curve(env + act),
        actor_cpu=curve(env + act),
        replay=replay,
        learners=(LearnerCost(device="cpu", threads=1, seconds=learner),),
        updates_per_step=0.125,
        batches_per_step=0.125,
        experience_message=((4, message), (1024, message)),
        batch_message=message,
        wake=40 * US,
        cpu_share=1.0,
        row_bytes=64,
        batch_bytes=9216,
    )
    return Measurements.model_validate({**found.model_dump(), **changes})


seconds = st.floats(1e-7, 1e-2)
any_measurements = st.builds(
    measurements, env=seconds, act=seconds, replay=seconds, learner=seconds, message=st.floats(1e-6, 1e-3)
)
