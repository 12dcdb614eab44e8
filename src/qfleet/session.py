"""One run from its directory to its summary: build, restore, train, test the kept model, write down what came of it."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from qfleet.ability import require_able
from qfleet.algo.flat import FlatParameters
from qfleet.algo.model_io import ModelConfigs, load_model, save_model
from qfleet.algo.networks import build_network
from qfleet.control.computing import who_computes
from qfleet.control.monitor import Callbacks, Monitor, Standing, StopReason
from qfleet.control.plan import Plan
from qfleet.control.summary import summarise
from qfleet.core import failpoints
from qfleet.core.announcing import heard_by
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError, RoleFailure
from qfleet.core.failpoints import failpoint
from qfleet.core.protocols import Incident, Placement
from qfleet.core.saving import Saving
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Array, Weights
from qfleet.core.usercode import UserCode
from qfleet.crowding import require_processes_fit
from qfleet.envs import make_env
from qfleet.experiment import Experiment
from qfleet.interrupts import Interrupts
from qfleet.observe.prometheus import PrometheusSink
from qfleet.observe.sinks import JsonlSink, Sink
from qfleet.observe.trackers import TensorBoardSink, WandbSink
from qfleet.playing import play_apart, play_here
from qfleet.program import absent, build_program, outlived, place
from qfleet.rearranging import rearranged
from qfleet.runtime import checkpoint
from qfleet.runtime.exhaustion import exhaustion_told
from qfleet.runtime.faraway import Faraway
from qfleet.runtime.graph import open_handles
from qfleet.runtime.ownership import INTERRUPTED
from qfleet.runtime.restarts import Restarts
from qfleet.runtime.rundir import RunDir, ending
from qfleet.setups import learner_device, saved_row_bytes, server_device
from qfleet.sharing import crossing_bytes, require_shared_memory

_QUICK_S = 60.0
"""A death is quick that comes sooner than this after the run began or went back, or before a checkpoint did."""


@dataclass(frozen=True)
class Fallen:
    """How far a run was whose roles could not be begun anew by themselves, and when that was."""

    failure: RoleFailure
    updates: int
    training_s: float
    at: float
    """In seconds of `time.monotonic`."""


@dataclass
class Session:
    """What a run is made of besides its roles."""

    experiment: Experiment
    code: UserCode
    run: RunDir
    callbacks: Callbacks
    sinks: Sequence[Sink]
    faraway: Faraway | None = None
    """Where checkpoints are copied besides."""
    regrouped: bool = False
    """Whether somebody asked for the number of learners, which then holds instead of the one that the run had."""
    settings: str | None = None
    """What config.yaml is to say from the moment on at which the run goes on; None where it stays. Before that moment
    nobody knows whether it can: whoever dies on the way leaves a run that goes on as it did."""
    provisional: Path | None = None
    """A checkpoint that was prepared for other learners, until they go on from it."""
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _fallen: Fallen | None = None
    """What a death has undone, until the run goes on."""
    _falls: int = 0
    """How often that has happened."""
    _opened: list[Sink] = field(default_factory=list)
    """All sinks, while the run lasts."""
    _monitor: Monitor | None = None
    """The last one, once there is one."""

    def carry_out(self, restore: checkpoint.Found | None = None) -> dict[str, Any]:
        """Train from the start, or from a checkpoint, to the end; return the summary."""
        failpoints.arm(failpoints.wanted(), "driver", everyone=False)  # until there is a placement
        with self._interrupts.handled(), ExitStack() as whole:
            self.run.end = self._interrupts.ask
            try:
                with exhaustion_told():
                    return self._persist(restore, whole)
            except BaseException as error:
                self._announce_failure(error)
                raise
            finally:
                self.run.end = lambda: False
                self.run.wished = lambda wish: False

    def _persist(self, restore: checkpoint.Found | None, whole: ExitStack) -> dict[str, Any]:
        """Train to the end, also over deaths after which all must go back to a checkpoint."""
        restarts = Restarts(self.experiment.survival.restarts, _QUICK_S)
        while True:
            began, saved = time.monotonic(), checkpoint.complete(self.run.checkpoints)
            try:
                return self._carry_out(restore, whole)
            except RoleFailure as failure:
                if self._fallen is None:
                    raise
                if self._interrupts.count:
                    raise KeyboardInterrupt from failure  # the end was asked for: nothing that it undid is made anew
                in_vain = saved == checkpoint.complete(self.run.checkpoints)  # it would go back to the same moment
                delay = restarts.delay(failure.role, 0.0 if in_vain else time.monotonic() - began)
                if delay is None:
                    cause = f"{failure.cause}; {restarts.too_many(failure.role)}"
                    raise RoleFailure(failure.role, failure.index, cause, died=True) from failure
                self._interrupts.heed()
                time.sleep(delay)
                restore = self._last_checkpoint()

    def _announce_failure(self, error: BaseException) -> None:
        """Tell what ended the run before its time; nobody listens yet when it is still being built.

        What is refused before it begins is no end of a run that was there before.
        """
        refused = isinstance(error, ConfigError) and not self.run.begun
        if self._monitor is None or refused:
            return
        if ending(error) == INTERRUPTED:
            self._monitor.announce({"event": "stopped", "reason": "at_once"})
        else:
            self._monitor.announce({"event": "failed", "reason": ending(error)})

    def _last_checkpoint(self) -> checkpoint.Found | None:
        """Return where a run that fell back as a whole goes on; None for its beginning."""
        if not checkpoint.complete(self.run.checkpoints):
            return None
        found = checkpoint.newest_good(self.run.checkpoints)
        checkpoint.set_aside(found, self.run.epoch)
        self.experiment = self.experiment.replace(warm_start=None)  # the checkpoint has what came of it
        return found

    def _carry_out(self, restore: checkpoint.Found | None, whole: ExitStack) -> dict[str, Any]:
        """Train to the end or to a failure; `whole` is closed when there is no further try."""
        self._interrupts.heed()
        failpoint("resume.before_rearranging")
        moved = restore is not None and _rearranged(self.experiment, restore, self.regrouped)
        spec, grade = self._look_at_environment()
        plan = Plan.from_yaml(self.run.plan) if self.run.plan.is_file() else None
        require_able(self.experiment, spec, self.code)
        require_processes_fit(self.experiment)
        require_shared_memory(self.experiment, spec, self.code)
        program = build_program(self.experiment, spec, self.code, self.run.epoch.folder)
        if restore is not None and moved:
            restore = rearranged(restore, program, self.experiment, self.run.epoch)
            self.provisional = restore.directory
            grade = "episode"
        if not self._opened:
            self._opened = [whole.enter_context(_closing(sink)) for sink in [*self._own_sinks(), *self.sinks]]
        with ExitStack() as stack:
            with heard_by(self._tell):
                in_flight = crossing_bytes(self.experiment, spec, self.code)
                placement = place(program, self.experiment, in_flight, *self._absent(restore))
            stack.push(self._end_saving)  # after that, which ends the roles that write
            stack.callback(placement.close)
            stack.callback(self._interrupts.ignore)  # before that: closing must not be cut short
            self._monitor = monitor = Monitor(
                self.experiment,
                placement,
                open_handles(program.monitor, placement.open),
                self._opened,
                self.callbacks,
                save=lambda steps, standing, best: self._save(placement, spec, steps, standing, best),
                standing=Standing(training_s=0.0 if self._fallen is None else self._fallen.training_s),
                row_bytes=saved_row_bytes(self.experiment, spec),
            )
            why = {"inference": plan.reasons["inference"]} if plan and "inference" in plan.reasons else {}
            servers = "" if why else server_device(self.experiment, spec)
            grade = self._announce_start(monitor, grade, restore, servers)
            self._announce_fall(monitor, restore)
            if plan is not None:
                monitor.announce({"event": "planned", "text": plan.line(), **why})
            self._commit()
            self.run.begun = True
            if monitor.growing is not None:
                self.run.wished = monitor.growing.ask
            with self._interrupts.stopping(monitor, placement):
                reason = self._train(monitor)
                returns = self._test()
                if self._interrupts.count:
                    reason = "interrupt"
                summary = summarise(self.experiment, monitor.standing, reason, monitor.counts(), returns)
                summary |= {"resume_grade": grade, "device": learner_device(self.experiment, spec)}
                summary |= {"accel": monitor.accel, "plan": None if plan is None else plan.in_short()}
                self.run.write_summary(summary)
            end = {"event": "stopped" if reason == "interrupt" else "finished", "reason": reason}
            monitor.announce(end | ({"by": self.run.ended_by} if reason == "interrupt" and self.run.ended_by else {}))
        return summary

    def _commit(self) -> None:
        """Have the run be what it goes on as from now on. The settings come first: a checkpoint for other learners that
        is lost can be made anew from them, but one that the settings do not tell of would change who learns."""
        if self.settings is not None:
            failpoint("resume.before_settings")
            self.run.write(self.run.config, self.settings)
            failpoint("resume.after_settings")
            self.settings = None
        if self.provisional is not None:
            checkpoint.publish(self.run.epoch, self.provisional)
            self.provisional = None

    def _absent(self, restore: checkpoint.Found | None) -> tuple[list[str] | None, int]:
        """Return the roles that were not there when the run was saved, and how many shards were; None and 0 for a new
        run."""
        saved = {} if restore is None else restore.manifest.get("standing", {})
        if not self.experiment.scalable or not saved.get("actors"):  # nor do older checkpoints say it
            return None, 0
        return absent(self.experiment, saved["actors"], saved["learners"]), saved.get("shards", 0)

    def _train(self, monitor: Monitor) -> StopReason:
        """Let the run go on until something ends it; note how far it was where a death makes it fall back."""
        try:
            return monitor.run()
        except RoleFailure as failure:
            if failure.died and self.experiment.fused and not outlived(self.experiment):
                updates, now = monitor.counts()["updates"], time.monotonic()
                self._fallen = Fallen(failure, updates, monitor.training_s, now)
                self._falls += 1
            raise

    def _announce_fall(self, monitor: Monitor, restore: checkpoint.Found | None) -> None:
        """Tell of a death, and say what it has cost."""
        if self._fallen is not None:
            failure, updates = self._fallen.failure, monitor.counts()["updates"]
            repair_s = time.monotonic() - self._fallen.at
            death = Incident(failure.role, failure.index, failure.cause, self._falls, repair_s)
            monitor.announce({"event": "restart", **dataclasses.asdict(death)})
            where = "the beginning, since there was no checkpoint" if restore is None else "the last checkpoint"
            text = (
                f"{failure}: all loops were restarted from update {updates}, that of {where}:"
                f" {self._fallen.updates - updates} updates lost"
            )
            monitor.announce({"event": "notice", "role": "fused", "index": 0, "kind": "restarted", "text": text})
            self._fallen = None

    def _tell(self, text: str) -> None:
        """Show what is being done, or to be known, before the run begins."""
        for sink in self._opened:
            with suppress(QfleetError):  # a full disk, of which the monitor will tell
                sink.event({"event": "preparing", "time": time.time(), "wall_s": 0.0, "text": text})

    def _look_at_environment(self) -> tuple[EnvSpec, str]:
        """Return what an agent has to know of the environment, and how exactly the run can be resumed."""
        probe = make_env(self.experiment.env, 1, factory=self.code.env)
        probe.close()
        # sums on a GPU come in any order unless that is forbidden
        repeatable = learner_device(self.experiment, probe.spec) == "cpu" or self.experiment.accel.deterministic
        return probe.spec, probe.resume_grade if self.experiment.in_turns and repeatable else "episode"

    def _announce_start(self, monitor: Monitor, grade: str, restore: checkpoint.Found | None, servers: str) -> str:
        """Restore the run if it is to go on, and say how it begins; return how exactly it can be resumed after all.

        `servers` is where inference servers compute; empty where a plan says who does.
        """
        experiment = self.experiment
        event = {"event": "started", "resume_grade": grade, "run_dir": str(self.run.path), "env_steps": 0}
        event |= {"epoch": self.run.epoch.number}
        began_before = (told := self.run.path / "events.jsonl").exists() and told.stat().st_size > 0
        event |= {"preset": experiment.preset, "algo": experiment.algo, "seed": experiment.seed}
        monitor.listen()  # before the edges are restored, and what roles said is forgotten
        if restore is not None:
            monitor.placement.restore(restore.directory)
            try:
                standing = Standing(**restore.manifest["standing"])
                standing.training_s = max(standing.training_s, monitor.standing.training_s)
                monitor.resume_from(standing)
            except (KeyError, TypeError) as error:
                raise CheckpointError(f"{restore.directory}: its manifest does not say how the run stood") from error
            event |= {"event": "resumed", "env_steps": restore.manifest["env_steps"]}
            event |= {"checkpoint": restore.directory.name, "skipped": restore.skipped, "mended": restore.mended}
            monitor.listen()
        event["resume_grade"] = grade if monitor.exact else "episode"
        former = bool(monitor.standing.deadlines_ms) if monitor.standing.envs else None
        if servers and (computing := who_computes(experiment, servers, former)):
            event["inference"] = computing
        monitor.announce(event)
        if restore is not None:
            _tell_damage(monitor, restore)
        elif began_before:
            text = "it had no checkpoint yet: it begins anew at step 0, and what it had learned before is lost"
            monitor.announce({"event": "notice", "role": "checkpoint", "index": 0, "kind": "anew", "text": text})
        return str(event["resume_grade"])

    def _own_sinks(self) -> list[Sink]:
        track, path = self.experiment.track, self.run.path
        sinks: list[Sink] = [JsonlSink(path, self.run.epoch.require)]
        if track.tensorboard:
            sinks.append(TensorBoardSink(path / "tensorboard"))
        if track.wandb:
            sinks.append(WandbSink(track.wandb, path.name, path))
        if track.prometheus is not None:
            sinks.append(PrometheusSink(track.prometheus_address, track.prometheus, str(path)))
        return sinks

    def _end_saving(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let a checkpoint that is being written be finished, unless a person wants the run to end at once."""
        if self._monitor is not None and self._monitor.saving is not None:
            if isinstance(error, KeyboardInterrupt):
                self._monitor.saving.abandon()
            self._monitor.saving.join()

    def _save(
        self, placement: Placement, spec: EnvSpec, env_steps: int, standing: Standing, best: Weights | None
    ) -> Saving:
        """Take the paused run as it is; it is written beside it, after the best model so far if that is new."""
        epoch = self.run.epoch
        meta = {"standing": dataclasses.asdict(standing), "arrangement": self.experiment.arrangement}
        epoch.require()
        if not self.run.config.exists():  # somebody deleted the directory, and nothing could be resumed without it
            self.run.write(self.run.config, self.experiment.to_yaml())
        keep_model = None if best is None else self._keeping(spec, best)
        partial = checkpoint.begin(epoch, env_steps)
        try:
            writing = placement.save(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

        def fill() -> None:
            writing.finish()
            if keep_model is not None:
                keep_model()

        remarks: list[str] = []

        def work() -> Path:
            keep = self.experiment.checkpoint.keep
            saved = checkpoint.save(epoch, partial, fill, meta, keep, remarks.append)
            if self.faraway is not None:
                self.faraway.copy(saved, self.run.path, keep)
            return saved

        return Saving(env_steps, work, writing.abandon, remarks)

    def _keeping(self, spec: EnvSpec, weights: Weights) -> Callable[[], None]:
        """Return what writes weights as the run's model. The network is built here: that uses torch's random stream."""
        experiment = self.experiment
        network = build_network(
            experiment.network, experiment.agent, spec, seed=experiment.seed, custom=self.code.network
        )
        FlatParameters(network).load_numpy(weights.flat)
        extra = {
            "preset": experiment.preset,
            "env_steps": weights.env_steps,
            # Values are in units of the environment's rewards times this.
            "reward_scale": getattr(experiment.env, "reward_scale", 1.0) / weights.reward_scale,
        }
        configs = ModelConfigs(network=experiment.network, agent=experiment.agent)
        return lambda: save_model(self.run.model, network, spec, configs, extra, self.run.epoch.require)

    def _test(self) -> Array | None:
        """Return the kept model's scores on the test seeds; None without a model, or when a signal cuts in."""
        if not (self.run.model / "model.json").is_file():
            return None
        return self._interrupts.at_once(self._tested)

    def _tested(self) -> Array:
        """Return the kept model's scores: played where roles are, so that no environment ends the run."""
        experiment, model = self.experiment, load_model(self.run.model, self.code.network)
        announce, interrupts = self._announce, self._interrupts
        if experiment.placement == "inline":
            seed, episodes = experiment.seed, experiment.evaluation.test_episodes
            return play_here(experiment, self.code, model.network, episodes, seed, "test", announce, interrupts.asked)
        return play_apart(experiment, self.code, model, announce, interrupts.asked, interrupts.ignore)

    def _announce(self, event: dict[str, Any]) -> None:
        if self._monitor is not None:
            self._monitor.announce(event)


def _rearranged(experiment: Experiment, restore: checkpoint.Found, regrouped: bool) -> bool:
    """Return whether a checkpoint was saved by other learners; refuses those of other fused loops.

    Each of these has its own environments and memory. Older checkpoints do not say whose they are. A run that grew or
    shrank goes on as it was, unless somebody asks for a number of learners now.
    """
    own = experiment.arrangement
    saved = {name: restore.manifest.get("arrangement", {}).get(name, value) for name, value in own.items()}
    if experiment.fused and saved != own:
        raise ConfigError(
            f"{restore.directory} was saved with {saved['ranks']} fused loops in"
            f" {'one process' if saved['one role'] else 'processes'}: resume with that number in that placement, or"
            " begin a new run with its model (warm_start)"
        )
    there = restore.manifest.get("standing", {}).get("learners", 0)
    return saved != own or (regrouped and experiment.serving is None and there not in (0, experiment.ranks))


def _tell_damage(monitor: Monitor, restore: checkpoint.Found) -> None:
    """Say which files of the run were damaged, and what was done about it."""
    used = f"checkpoint {restore.directory.name}, the one before, was used"
    lines = [("damaged", f"{line}: {used}") for line in restore.skipped]
    for kind, text in [*lines, *(("mended", line) for line in restore.mended)]:
        monitor.announce({"event": "notice", "role": "checkpoint", "index": 0, "kind": kind, "text": text})


@contextmanager
def _closing(sink: Sink) -> Iterator[Sink]:
    try:
        yield sink
    finally:
        sink.close()
