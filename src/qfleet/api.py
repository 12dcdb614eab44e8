"""The stable names: train, resume, fetch, evaluate, load and plan; all that the command line does goes through here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium

from qfleet.algo.model_io import load_model
from qfleet.algo.policy import Policy
from qfleet.control.monitor import Callbacks
from qfleet.control.plan import Plan
from qfleet.core.config import Config
from qfleet.core.errors import CheckpointError, ConfigError, EnvironmentFault
from qfleet.core.types import Array
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment, flattened, with_changes
from qfleet.observe.sinks import Sink
from qfleet.planning import apply_plan, plan_run
from qfleet.playing import play_here
from qfleet.presets import preset as find_preset
from qfleet.presets.algorithms import apply as apply_algorithm
from qfleet.runtime import checkpoint
from qfleet.runtime.faraway import Faraway, is_address
from qfleet.runtime.rundir import RunDir
from qfleet.session import Session

Factory = Callable[[], gymnasium.Env[Any, Any]]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    dir: Path
    summary: dict[str, Any]


def train(
    preset: str | Experiment = "",
    *,
    env: str | Factory | None = None,
    network: Callable[..., Any] | Mapping[str, Any] | Config | None = None,
    run_dir: str | Path | None = None,
    plan: str | Path | Plan | None = None,
    fixed: Collection[str] = (),
    callbacks: Callbacks | None = None,
    sinks: Sequence[Sink] = (),
    **settings: Any,
) -> Run:
    """Train an agent and wait until it is trained.

    Give a preset's name, an Experiment, or `env`: the id of a registered environment or a function that makes one.
    `network` is a torch module class used as the torso, or settings of a built-in network. Further keywords change
    settings: `seed=1`, `target=475`, `optim={"lr": 1e-3}`, or `**{"optim.lr": 1e-3}`; `algo="rainbow"` puts another
    algorithm in place of the experiment's own, before all other changes.

    `plan` arranges the roles of placement "processes": "auto" measures this machine first, a `Plan` or its file is
    followed as it is. Without one, a preset in processes is planned unless `actors` is given. What a plan finds in
    `settings` or, by dotted name, in `fixed` stays as it is.
    """
    if callbacks is not None and not isinstance(callbacks, Callbacks):
        raise ConfigError("callbacks: pass qfleet.Callbacks(on_step=..., on_evaluation=..., on_checkpoint=...)")
    automatic = settings.get("actors") == "auto"
    if automatic:
        settings = {name: value for name, value in settings.items() if name != "actors"}
    experiment, code = _wanted(preset, env, network, settings)
    given = {*fixed, *(name for name, _ in flattened(settings))}
    if plan is None and isinstance(preset, str) and experiment.beside and "actors" not in given:
        automatic = True
    path = _directory(run_dir) if run_dir is not None else default_run_dir(experiment)
    with RunDir.create(path) as run:
        experiment, made = _planned(experiment, code, "auto" if automatic and plan is None else plan, given, sinks)
        faraway = _faraway(experiment, new=True)
        run.write(run.config, experiment.to_yaml())
        if made is not None:
            run.write(run.plan, made.to_yaml())
        session = Session(experiment, code, run, callbacks or Callbacks(), sinks, faraway)
        return Run(run.path, session.carry_out())


def plan(
    preset: str | Experiment = "",
    *,
    env: str | Factory | None = None,
    network: Callable[..., Any] | Mapping[str, Any] | Config | None = None,
    fixed: Collection[str] = (),
    fresh: bool = False,
    say: Callable[[str], object] = lambda text: None,
    **settings: Any,
) -> Plan:
    """Measure this machine for an experiment, given as in `train`, and return how its roles are best arranged.

    Nothing is trained or written but a cache of what was measured, which `fresh` measures anew. What is given in
    `settings` or, by dotted name, in `fixed` stays as it is; without a placement the faster one is chosen. `say` is
    told what is being done.
    """
    if settings.get("actors") == "auto":
        settings = {name: value for name, value in settings.items() if name != "actors"}
    experiment, code = _wanted(preset, env, network, settings)
    given = {*fixed, *(name for name, _ in flattened(settings))}
    return plan_run(experiment, code, given, say, fresh)


def plan_learners(
    experiment: Experiment, *, simulate: str = "", fresh: bool = False, say: Callable[[str], object] = lambda text: None
) -> str:
    """Return, as text, how several learners would best share an update here, or what a cluster would do.

    `simulate` names the cluster, as "actors=2000,learners=64"; without it the ways that this machine allows are
    compared. Nothing is trained.
    """
    from qfleet.scaling import learners_text, simulation_text

    if simulate:
        return simulation_text(experiment, UserCode(), simulate, say, fresh)
    return learners_text(experiment, UserCode(), say, fresh)


def _wanted(
    preset: str | Experiment,
    env: str | Factory | None,
    network: Callable[..., Any] | Mapping[str, Any] | Config | None,
    settings: dict[str, Any],
) -> tuple[Experiment, UserCode]:
    """Return the experiment that the arguments of `train` stand for, and the user's own code."""
    if "target" in settings:
        settings["evaluation.target"] = settings.pop("target")
    algo = settings.pop("algo", None)
    if isinstance(network, Mapping | Config):
        settings, network = {**settings, "network": network}, None
    experiment = _experiment(preset, env)
    if algo is not None:
        experiment = apply_algorithm(experiment, str(algo))
    if network is not None:
        settings.setdefault("network", {"kind": "custom"})
    return with_changes(experiment, settings), UserCode(network=network, env=env if callable(env) else None)


def _planned(
    experiment: Experiment,
    code: UserCode,
    plan: str | Path | Plan | None,
    given: Collection[str],
    sinks: Sequence[Sink],
) -> tuple[Experiment, Plan | None]:
    """Return the experiment as its plan has it, and the plan; what is to be inline has no plan to be made."""

    def say(text: str) -> None:
        for sink in sinks:
            sink.event({"event": "planning", "text": text})

    if plan is None or (plan == "auto" and experiment.placement == "inline" and "placement" in given):
        return experiment, None
    if plan == "auto":
        decided = set() if experiment.placement == "inline" else {"placement"}
        try:
            made = plan_run(experiment, code, {*given, *decided}, say)
        except EnvironmentFault as fault:  # which training survives
            if experiment.placement == "inline":
                raise
            say(f"{fault} So nothing could be timed, and the run goes on without a plan (--actors says how many)")
            return experiment, None
        return apply_plan(experiment, made), made
    made = plan if isinstance(plan, Plan) else Plan.from_yaml(Path(plan))
    return apply_plan(experiment, made, given), made


def resume(
    run_dir: str | Path,
    *,
    env_steps: int | None = None,
    placement: str | None = None,
    learners: int | None = None,
    parallel: Mapping[str, Any] | None = None,
    env: Factory | None = None,
    network: Callable[..., Any] | None = None,
    callbacks: Callbacks | None = None,
    sinks: Sequence[Sink] = (),
) -> Run:
    """Go on with a run from its newest good checkpoint, to its budget or to a new one of `env_steps`.

    With another `placement` the same roles go on there; with other `learners` or settings of `parallel`, by their names
    in it, others learn from now on. A run that ended before its first checkpoint begins anew. One that reached its
    target is tested once more; with a new budget it goes on.
    """
    run = RunDir.existing(_directory(run_dir))
    experiment = Experiment.from_yaml(run.config)  # before the run is taken over from anybody
    with run:
        found = checkpoint.newest_good(run.checkpoints) if checkpoint.complete(run.checkpoints) else None
        asked = {"env_steps": env_steps, "placement": placement, "learners": learners, "parallel": parallel}
        settings = None
        if changes := {name: value for name, value in asked.items() if value is not None}:
            experiment = _changed(experiment, changes, run, found)
            settings = experiment.to_yaml()
        if found is not None:
            checkpoint.set_aside(found, run.epoch)
            experiment = experiment.replace(warm_start=None)  # the checkpoint has what came of it
        code = UserCode(network, env)
        faraway = _faraway(experiment, new=False)
        session = Session(
            experiment, code, run, callbacks or Callbacks(), sinks, faraway, learners is not None, settings
        )
        try:
            return Run(run.path, session.carry_out(found))
        except BaseException:
            if session.provisional is not None:  # it cannot be done: the next try finds the run as it was
                run.epoch.discard(session.provisional)
            raise


def fetch(address: str, run_dir: str | Path | None = None) -> Path:
    """Copy a run from the `checkpoint.target` that it was saved to into a new directory, and return that: see `resume`.

    Without `run_dir` it is one under runs/.
    """
    if not isinstance(address, str) or not is_address(address):
        raise ConfigError(f"{address!r} is not an address of fsspec, such as s3://bucket/run")
    path = _directory(run_dir) if run_dir is not None else Path("runs") / address.rstrip("/").rpartition("/")[2]
    if path.exists():
        raise ConfigError(f"{path} exists already: go on with it (`qfleet resume {path}`), or name another with --into")
    Faraway(address).fetch(path)
    return path


def _faraway(experiment: Experiment, new: bool) -> Faraway | None:
    """Return where the run's checkpoints are copied, if anywhere; nobody else writes there from now on."""
    if experiment.checkpoint.target is None:
        return None
    faraway = Faraway(experiment.checkpoint.target)
    faraway.take_over(new)
    return faraway


def _changed(
    experiment: Experiment, changes: dict[str, Any], run: RunDir, found: checkpoint.Found | None
) -> Experiment:
    """Return the settings with which a run is to go on; refuses those that its checkpoint does not fit."""
    if found is not None and "env_steps" in changes and found.manifest.get("standing", {}).get("solved"):
        changes = {**changes, "evaluation.stop_at_target": False}  # what it was given more steps for
    changed = with_changes(experiment, changes)
    if found is None:
        return changed
    if changed.fused and not experiment.fused and experiment.topology == "auto":
        changed = with_changes(experiment, {**changes, "topology": "pipeline"})  # what it was built as
    if "env_steps" in changes and changed.env_steps < (reached := found.manifest["env_steps"]):
        raise ConfigError(f"env_steps {changed.env_steps} is less than the {reached} that {run.path} has behind it")
    if changed.fused != experiment.fused:
        what = "one fused loop" if experiment.fused else "a pipeline of roles"
        raise ConfigError(
            f"the run in {run.path} is {what}, which placement '{changed.placement}' would arrange anew:"
            " train with --topology pipeline what is to change its placement or its learners"
        )
    return changed


def load(directory: str | Path, network: Callable[..., Any] | None = None) -> Policy:
    """Return the policy of a run or of a bare model directory; a custom network's class is passed by the caller."""
    model = load_model(model_directory(_directory(directory)), network)
    return Policy(model.network, model.spec)


def evaluate(
    run_dir: str | Path,
    *,
    episodes: int = 100,
    seed: int = 0,
    env: Factory | None = None,
    network: Callable[..., Any] | None = None,
) -> Array:
    """Play episodes with a run's kept model, on seeds that neither training nor its tests use; returns [episodes]."""
    if not isinstance(episodes, int) or episodes < 1:
        raise ConfigError(f"episodes = {episodes!r}: should be a whole number from 1 on")
    if not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed = {seed!r}: should be a whole number from 0 on")
    run = RunDir.existing(_directory(run_dir))
    experiment = Experiment.from_yaml(run.config)
    policy = load(run.path, network)
    return play_here(experiment, UserCode(network, env), policy.network, episodes, seed, "fresh")


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


def _directory(name: str | Path) -> Path:
    """Return a directory's path; refuses what cannot be one, such as an empty name."""
    if not isinstance(name, str | Path) or not str(name).strip() or "\0" in str(name):
        raise ConfigError(f"{name!r} is not the name of a directory")
    return Path(name)


def _experiment(preset: str | Experiment, env: str | Factory | None) -> Experiment:
    if isinstance(preset, Experiment):
        return preset
    if not isinstance(preset, str) or not (env is None or isinstance(env, str) or callable(env)):
        raise ConfigError("a preset is a name or an Experiment; env is an id, or a class or function that makes one")
    if bool(preset) == (env is not None):
        raise ConfigError("give either a preset (train('cartpole')) or an environment (train(env='CartPole-v1'))")
    if preset:
        return find_preset(preset)
    return find_preset(f"gym:{env}") if isinstance(env, str) else find_preset("gym:", factory=env)
