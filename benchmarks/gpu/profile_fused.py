"""Prints which kernels the time of a fused loop goes to.

python benchmarks/gpu/profile_fused.py
"""

from __future__ import annotations

import torch
from fused import build, cartpole_pqn
from torch.profiler import ProfilerActivity, profile

from qfleet.presets import preset


def show(what: str, loop: object, rows: int = 14) -> None:
    for _ in range(6):
        loop.advance()  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            loop.advance()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total, count = sum(event.self_device_time_total for event in events), sum(event.count for event in events)
    print(f"{what}: {total / 2:,.0f} us and {count / 2:,.0f} kernels a piece")
    for event in events[:rows]:
        print(f"  {event.self_device_time_total / 2:9,.0f} us {event.count / 2:7,.0f} x  {event.key[:110]}")


if __name__ == "__main__":
    show("pqn cartpole 4096 x 32, 2 epochs of 8", build(cartpole_pqn(4096, 32, 2, 8)))
    show("pqn breakout 2048 x 32", build(preset("minatar:breakout"), **{"actor.envs": 2048, "agent.minibatches": 32}))
