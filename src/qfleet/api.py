"""The stable names: train, resume, evaluate and load; everything the command line does goes through here."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import numpy as np

from qfleet.algo.flat import FlatParameters
from qfleet.algo.model_io import ModelConfigs, load_model, save_model
from qfleet.algo.networks import build_network
from qfleet.algo.policy import Policy
from qfleet.control.monitor import Callbacks, Monitor, Standing
from qfleet.control.summary import summarise
from qfleet.core.config import Config
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Array, Weights
from qfleet.core.usercode import UserCode
from qfleet.envs import make_env
from qfleet.experiment import Experiment, with_changes
from qfleet.observe.sinks import JsonlSink, Sink
from qfleet.observe.trackers import TensorBoardSink, WandbSink
from qfleet.presets import preset as find_preset
from qfleet.program import build_program, learner_device, place
from qfleet.roles.evaluator import play
from qfleet.runtime import checkpoint
from qfleet.runtime.graph import open_handles
from qfleet.runtime.rundir import RunDir


@dataclass(frozen=True)
class Run:
    """A finished run."""

    dir: Path
    summary: dict[str, Any]


def train(
    preset: str | Experiment = "",
    *,
    env: str | Callable[[], gymnasium.Env[Any, Any]] | None = None,
    network: Callable[..., Any] | Mapping[str, Any] | Config | None = None,
    run_dir: str | Path | None = None,
    callbacks: Callbacks | None = None,
    sinks: Sequence[Sink] = (),
    **settings: Any,
) -> Run:
    """Train an agent and wait until it is trained.

    Give a preset's name, an Experiment, or `env`: the id of a registered environment or a function that makes one.
    `network` is a torch module class used as the torso, or settings of a built-in network. Further keywords change
    settings: `seed=1`, `optim={"lr": 1e-3}`, or `**{"optim.lr": 1e-3}`.
    """
    if isinstance(network, Mapping | Config):  # settings of a built-in network
        settings, network = {**settings, "network": network}, None
    experiment = _experiment(preset, env)
    if network is not None:
        settings.setdefault("network", {"kind": "custom"})
    experiment = with_changes(experiment, settings)
    code = UserCode(network=network, env=env if callable(env) else None)
    path = Path(run_dir) if run_dir is not None else default_run_dir(experiment)
    with RunDir.create(path) as run:
        run.config.write_text(experiment.to_yaml())
        return _carry_out(experiment, code, run, callbacks or Callbacks(), sinks, restore=None)


def resume(
    run_dir: str | Path,
    *,
    env_steps: int | None = None,
    env: Callable[[], gymnasium.Env[Any, Any]] | None = None,
    network: Callable[..., Any] | None = None,
    callbacks: Callbacks | None = None,
    sinks: Sequence[Sink] = (),
) -> Run:
    """Go on with a run from its newest good checkpoint, to its budget or to a new one of `env_steps`."""
    with RunDir.existing(Path(run_dir)) as run:
        experiment = Experiment.from_yaml(run.config)
        if env_steps is not None:
            experiment = with_changes(experiment, {"env_steps": env_steps})
            run.config.write_text(experiment.to_yaml())
        found = checkpoint.newest_good(run.checkpoints)
        return _carry_out(experiment, UserCode(network, env), run, callbacks or Callbacks(), sinks, restore=found)


def load(directory: str | Path, network: Callable[..., Any] | None = None) -> Policy:
    """Return the policy of a run or of a bare model directory; a custom network's class is passed by the caller."""
    model = load_model(model_directory(Path(directory)), network)
    return Policy(model.network, model.spec)


def evaluate(
    run_dir: str | Path,
    *,
    episodes: int = 100,
    seed: int = 0,
    env: Callable[[], gymnasium.Env[Any, Any]] | None = None,
    network: Callable[..., Any] | None = None,
) -> Array:
    """Play episodes with a run's kept model on fresh seeds; returns their scores [episodes]."""
    run = RunDir.existing(Path(run_dir))
    experiment = Experiment.from_yaml(run.config)
    policy = load(run.path, network)
    return _play(experiment, UserCode(network, env), policy, episodes, seed)


def model_directory(path: Path) -> Path:
    """Return where a run directory, or a bare model directory, keeps its model."""
    for candidate in (path / "model", path):
        if (candidate / "model.json").is_file():
            return candidate
    raise CheckpointError(
        f"{path} holds no model: a run keeps its first one at its first checkpoint after an evaluation"
    )


def default_run_dir(experiment: Experiment) -> Path:
    """Return a directory under runs/ that says what the run is."""
    name = experiment.preset.replace(":", "-").replace("/", "-")
    return Path("runs") / f"{name}-{experiment.algo}-s{experiment.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _experiment(preset: str | Experiment, env: Any) -> Experiment:
    if isinstance(preset, Experiment):
        return preset
    if bool(preset) == (env is not None):
        raise ConfigError("give either a preset (train('cartpole')) or an environment (train(env='CartPole-v1'))")
    if preset:
        return find_preset(preset)
    return find_preset(f"gym:{env}") if isinstance(env, str) else find_preset("gym:", factory=env)


def _carry_out(
    experiment: Experiment,
    code: UserCode,
    run: RunDir,
    callbacks: Callbacks,
    sinks: Sequence[Sink],
    restore: tuple[Path, dict[str, Any], list[str]] | None,
) -> Run:
    """Build the program, run it to its end, test the kept model, and write the summary."""
    probe = make_env(experiment.env, 1, factory=code.env)
    spec, grade = probe.spec, probe.resume_grade if experiment.placement == "inline" else "episode"
    probe.close()
    program = build_program(experiment, spec, code, run.path)
    with ExitStack() as stack:
        all_sinks: list[Sink] = [stack.enter_context(_closing(s)) for s in [*_own_sinks(experiment, run), *sinks]]
        placement = place(program, experiment)
        stack.callback(placement.close)
        monitor = Monitor(
            experiment,
            placement,
            open_handles(program.monitor, placement.open),
            all_sinks,
            callbacks,
            save_checkpoint=lambda steps, standing: _save(experiment, run, placement, steps, standing),
            save_model=lambda weights: _save_model(experiment, spec, code, run, weights),
        )
        started = {"event": "started", "resume_grade": grade, "run_dir": str(run.path), "env_steps": 0}
        started |= {"preset": experiment.preset, "algo": experiment.algo, "seed": experiment.seed}
        if restore is not None:
            started |= _restore(monitor, restore)
        monitor.announce(started)
        with _interruptible(monitor):
            reason = monitor.run()
        returns = None
        if reason != "interrupt" and (run.model / "model.json").is_file():
            policy = load(run.path, code.network)
            returns = _play(experiment, code, policy, experiment.evaluation.test_episodes, experiment.seed, "test")
        device = learner_device(experiment, spec)
        summary = summarise(experiment, monitor.standing, reason, monitor.counts(), returns)
        summary |= {"resume_grade": grade, "device": device}
        run.write_summary(summary)
        monitor.announce({"event": "finished" if reason != "interrupt" else "stopped", "reason": reason})
    return Run(run.path, summary)


def _own_sinks(experiment: Experiment, run: RunDir) -> list[Sink]:
    sinks: list[Sink] = [JsonlSink(run.path)]
    if experiment.track.tensorboard:
        sinks.append(TensorBoardSink(run.path / "tensorboard"))
    if experiment.track.wandb:
        sinks.append(WandbSink(experiment.track.wandb, run.path.name, run.path))
    return sinks


def _save(experiment: Experiment, run: RunDir, placement: Any, env_steps: int, standing: Standing) -> Path:
    meta = {"standing": dataclasses.asdict(standing)}
    return checkpoint.save(run.checkpoints, env_steps, placement.save, meta, experiment.checkpoint.keep)


def _restore(monitor: Monitor, found: tuple[Path, dict[str, Any], list[str]]) -> dict[str, Any]:
    directory, manifest, skipped = found
    monitor.placement.restore(directory)
    monitor.resume_from(Standing(**manifest["standing"]))
    return {"event": "resumed", "env_steps": manifest["env_steps"], "checkpoint": directory.name, "skipped": skipped}


def _save_model(experiment: Experiment, spec: EnvSpec, code: UserCode, run: RunDir, weights: Weights) -> None:
    network = build_network(experiment.network, experiment.agent, spec, seed=experiment.seed, custom=code.network)
    FlatParameters(network).load_numpy(weights.flat)
    configs = ModelConfigs(network=experiment.network, agent=experiment.agent)
    save_model(run.model, network, spec, configs, {"env_steps": weights.env_steps, "preset": experiment.preset})


def _play(
    experiment: Experiment, code: UserCode, policy: Policy, episodes: int, seed: int, split: str = "test"
) -> Array:
    envs = min(experiment.evaluation.envs, episodes)
    env = make_env(experiment.env, envs, evaluation=True, factory=code.env)
    try:
        returns, _ = play(policy.network, env, experiment.evaluation, seed, split, episodes)
    finally:
        env.close()
    return np.asarray(returns)


@contextmanager
def _closing(sink: Sink) -> Iterator[Sink]:
    try:
        yield sink
    finally:
        sink.close()


@contextmanager
def _interruptible(monitor: Monitor) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the run cleanly; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if monitor.stopping is not None:
            raise KeyboardInterrupt
        monitor.stop("interrupt")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
