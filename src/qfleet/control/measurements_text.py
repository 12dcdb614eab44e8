"""Says in a person's units what was measured of a machine: environments, networks, updates, messages, memory."""

from __future__ import annotations

from collections.abc import Iterator

from qfleet.control.measurements import Curve, LearnerCost, Measurements, at
from qfleet.control.resources import Resources


def told(measured: Measurements, resources: Resources, envs: int) -> Iterator[tuple[str, str]]:
    """Yield what was measured, each with its name, for actors of so many environments."""
    yield "environments", _environments(measured, envs)
    yield "inference", f"{envs} observations: {_inference(measured, envs)}"
    if measured.updates_per_step:
        yield "update", "; ".join(f"{update_of(measured, one)}" for one in measured.learners)
    yield "messages", _messages(measured)
    if measured.copy_bytes_per_s:
        yield "copies", f"{measured.copy_bytes_per_s / 1e9:.1f} GB/s from memory to the GPU"
    yield "memory", _memory(resources)


def update_of(measured: Measurements, learner: LearnerCost) -> str:
    """Say what an update costs in one way of learning."""
    update = learner.seconds / measured.updates_per_step if measured.updates_per_step else learner.seconds
    threads = f", {learner.threads} threads" if learner.threads > 1 else ""
    drawn = f", {learner.updates_per_draw} drawn at once" if learner.updates_per_draw > 1 else ""
    return f"{learner.device}{threads}{drawn}: {1e3 * update:.2f} ms an update"


def _environments(measured: Measurements, envs: int) -> str:
    alone = envs / max(at(measured.env_tick, envs), 1e-9)
    rest = at(measured.actor_cpu, envs) - at(measured.act, envs)
    core = (
        f"; with what an actor does besides its network, {envs / rest:,.0f} for a core's whole time" if rest > 0 else ""
    )
    return f"{alone:,.0f} steps/s by {envs} that do nothing else{core}"


def _inference(measured: Measurements, envs: int) -> str:
    ways: tuple[tuple[str, Curve], ...] = (
        ("on a core", measured.act),
        ("there in bf16", measured.act_bf16),
        ("on the GPU, copies included", measured.act_cuda),
    )
    return ", ".join(f"{1e3 * at(curve, envs):.2f} ms {where}" for where, curve in ways if curve)


def _messages(measured: Measurements) -> str:
    rows, seconds = measured.experience_message[-1]
    speed = rows * measured.row_bytes / max(seconds, 1e-9)
    return f"{speed / 1e9:.2f} GB/s of experience between processes, and {1e6 * measured.wake:.0f} us each at both ends"


def _memory(resources: Resources) -> str:
    free, shared = resources.memory / 2**30, resources.shared_memory / 2**30
    gib = f"{free:.1f} GiB free, {shared:.1f} GiB in the folder for shared memory"
    gpus = ", ".join(f"{gpu.memory / 2**30:.0f} GiB on GPU {number}" for number, gpu in enumerate(resources.gpus))
    return f"{gib}{f', {gpus}' if gpus else ''}"
