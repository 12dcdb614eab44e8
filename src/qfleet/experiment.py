"""The settings of a whole run as one tree, what follows from them, and how a tree is read and changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import AgentConfig, ReplayAgent
from qfleet.algo.exploration import EpsilonGreedyConfig, ExplorationConfig
from qfleet.algo.networks import NetworkConfig
from qfleet.algo.optim import AdamConfig, OptimConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.contradictions import contradictions, why_not_fused
from qfleet.core.config import Config, completed, describe
from qfleet.core.errors import ConfigError
from qfleet.envs import EnvConfig
from qfleet.parallel.plan import ParallelConfig
from qfleet.parallel.serving import ServerConfig
from qfleet.replay import ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.inference_server import InferenceConfig, LocalInference
from qfleet.roles.learner_setup import LearnerConfig
from qfleet.roles.seats import ElasticConfig


class CheckpointConfig(Config):
    """When a run is saved."""

    every: int = Field(50_000, gt=0)
    """Environment steps between two checkpoints."""
    every_s: float = Field(300.0, gt=0)
    """Seconds between two checkpoints at most; saving changes nothing in what a run learns."""
    unsaved_mb: float = Field(512.0, gt=0)
    """Megabytes of new rows of the replay between two checkpoints, at most: the last one of a run that is asked to end
    is then soon written, however large the replay is. Compressed rows count as a quarter. Fused loops save by the two
    settings above alone."""
    keep: int = Field(2, gt=0)
    """Checkpoints that stay; the oldest go first."""
    target: str | None = None
    """Where each checkpoint is copied besides, as an address of fsspec (`s3://bucket/run`, `file:///mnt/run`): it
    counts as saved only when it is there, too. `qfleet resume ADDRESS` goes on from it on any machine."""


class SurvivalConfig(Config):
    """What a role may do before it is taken for dead, and how often it may die (placements 'processes' and 'ray')."""

    stall_s: float = Field(60.0, gt=0)
    """Seconds that one step of a role may take: one that takes longer hangs, and is begun anew. A step of an actor is
    `actor.unroll` steps of all its environments. Being built, compiling, evaluating, saving, and waiting for
    environments in processes of their own (env.step_timeout is their limit) may take ten times that, ten minutes at
    least."""
    restarts: int = Field(5, ge=0)
    """How many deaths of a role are survived in a row that each come within ten seconds of work, or before anything
    came of it, such as an evaluation; the next life begins later each time. Deaths after more work are survived however
    many there are. So often, too, the final test begins anew, and a group of fused loops goes back to a checkpoint
    within a minute, or before there is another one."""


class TrackConfig(Config):
    """Where metrics go besides the run's own files."""

    every_s: float = Field(2.0, gt=0)
    """Seconds between two records in metrics.jsonl, on the panel, and below."""
    tensorboard: bool = False
    """Write TensorBoard events into the run directory (extra: track)."""
    wandb: str = ""
    """Name of a Weights & Biases project to log to (extra: track); empty for none."""
    prometheus: int | None = Field(None, gt=0, lt=65536)
    """Port at which Prometheus can scrape the newest numbers while the run lasts (extra: prometheus)."""
    prometheus_address: str = "127.0.0.1"
    """Address to which that port is bound; by default only this machine can reach it."""


class Experiment(Config):
    """Everything that decides what a run does; saved as config.yaml, from which the identical tree is loaded."""

    format: Literal[1] = 1
    """Version of this format."""
    preset: str = "custom"
    """What the settings were derived from."""
    algo: str = "dqn"
    """Name of the algorithm, for tables and summaries; the sections below are what counts."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Every random stream of the run derives from this number."""
    env_steps: int = Field(100_000, gt=0)
    """Agent steps in all environments together, after which the run ends."""
    topology: Literal["auto", "pipeline", "fused"] = "auto"
    """How the roles are joined: as a pipeline, which fits every environment, or fused into one loop on one device, for
    tensor-native ones; auto takes the fused loop where it fits."""
    placement: Literal["inline", "processes", "ray"] = "inline"
    """Where the roles live: in this process, in processes of this machine, or on a Ray cluster."""
    address: str | None = None
    """Ray cluster to join; None starts Ray on this machine."""
    actor_resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """What each actor needs of its node in a Ray cluster besides CPUs, by the names that `ray start --resources` gave:
    actors are only on nodes that have it."""
    actors: int = Field(1, gt=0, le=10_000)
    """How many actors there are, each with its own environments."""
    learners: int = Field(1, gt=0, le=1024)
    """How many ranks share each update's batch."""
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """Where the learner computes; auto takes a GPU of kind cuda for pixels and fused loops if there is one. AMD's are
    of that kind too; they, mps and xpu are untested."""
    threads: int = Field(1, gt=0, le=1024)
    """Threads of the learner's computations; a small network is fastest with one. Other roles have one."""
    balance: Literal["on", "off"] = "on"
    """Whether a balancer watches the roles' load in the placements with several processes, says what holds them up, and
    shares the environments out anew (agents of kind 'replay'); never inline or in lock-step."""
    spare_actors: int = Field(0, ge=0, le=10_000)
    """Further actors that sleep until the balancer wakes them; each costs a process and its environments' memory."""
    lockstep: bool = False
    """Let the roles of placement 'processes' or 'ray' step one at a time, in inline's order: slow, and with inline's
    numbers to the byte; all of them are on one machine then. Inline is always in lock-step."""
    strict: bool = False
    """Inline only: send every message through the serialiser, so that shared memory by mistake shows."""
    env: EnvConfig
    """What is played."""
    network: NetworkConfig = MlpConfig()
    """What computes the values."""
    agent: AgentConfig = ReplayAgent()
    """What is learned, and from what."""
    exploration: ExplorationConfig = EpsilonGreedyConfig()
    """How actors try what they would not choose."""
    actor: ActorConfig = ActorConfig()
    """How much one actor does at a time."""
    inference: InferenceConfig = LocalInference()
    """Who computes the values that actors act on."""
    replay: ReplayConfig = ReplayConfig()
    """What is remembered and how it is drawn (agents of kind 'replay')."""
    normalise_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return (agents of kind 'replay')."""
    learner: LearnerConfig = LearnerConfig()
    """How batches become updates."""
    optim: OptimConfig = AdamConfig()
    """How gradients become steps."""
    accel: AccelConfig = AccelConfig()
    """How updates are made fast."""
    parallel: ParallelConfig = ParallelConfig()
    """How several learners share an update."""
    elastic: ElasticConfig = ElasticConfig()
    """How far the run may grow and shrink."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When and how the agent is judged."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    survival: SurvivalConfig = SurvivalConfig()
    """When a role is taken for dead, and how often it may die."""
    track: TrackConfig = TrackConfig()
    """Where metrics go."""
    warm_start: str | None = None
    """Directory of a qfleet model whose weights the network begins with."""
    warm_start_part: Literal["all", "torso"] = "all"
    """What is taken over from that model: everything that fits, or the torso only."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Experiment:
        for wrong, message in contradictions(self):
            if wrong:
                raise ValueError(message)
        return self

    @property
    def serving(self) -> ServerConfig | None:
        """The parameter servers, if there are any."""
        return self.parallel.update if isinstance(self.parallel.update, ServerConfig) else None

    @property
    def split(self) -> int:
        """Ranks that share a network; inline each is computed as a whole."""
        return 1 if self.placement == "inline" else self.parallel.split

    @property
    def ranks(self) -> int:
        """How many ranks learn: those of all replicas, each of which may be split."""
        return self.learners * self.split

    @property
    def arrangement(self) -> dict[str, int | str]:
        """What of a checkpoint depends on who learns; a run with another one has it rearranged before it goes on."""
        serving = self.serving
        return {
            "ranks": self.ranks,
            "seats": self.rank_seats,
            "split": self.split,
            "one role": int(self.placement == "inline" and self.learners > 1),
            "servers": 0 if serving is None else serving.servers,
            "mode": "" if serving is None else serving.mode,
            "gradients": "" if serving is None else self.parallel.compression.model_dump_json(),
        }

    @property
    def inputs_normalized(self) -> bool:
        """Whether the network scales its inputs by what it has seen of them."""
        return bool(getattr(getattr(self.network, "input", None), "normalize", False))

    @property
    def values_by_actors(self) -> bool:
        """Whether new items get their priorities from the values that actors acted by."""
        sampler = self.replay.sampler
        return isinstance(self.agent, ReplayAgent) and sampler.kind == "prioritised" and sampler.initial == "actor"

    @property
    def beside(self) -> bool:
        """Whether roles step side by side in processes of this machine, as a plan arranges them."""
        return self.placement == "processes" and not self.in_turns

    @property
    def in_turns(self) -> bool:
        """Whether roles step in a fixed order, or wait for each other, so that numbers are the same every time."""
        return self.placement == "inline" or self.lockstep or self.fused

    @property
    def watched(self) -> bool:
        """Whether a balancer looks at the load of the run's roles."""
        return self.balance == "on" and not self.in_turns

    @property
    def balanced(self) -> bool:
        """Whether it may also change how the work is shared."""
        return self.watched and isinstance(self.agent, ReplayAgent)

    @property
    def all_actors(self) -> int:
        """Actors, those that begin asleep included."""
        return self.actors + self.spare_actors

    @property
    def scalable(self) -> bool:
        """Whether actors may come and go while the run lasts."""
        return not self.in_turns and isinstance(self.agent, ReplayAgent)

    @property
    def regroupable(self) -> bool:
        """Whether the number of learner ranks may change while the run lasts."""
        parallel = self.parallel
        sums = parallel.update.kind == "allreduce" and not parallel.in_pieces and parallel.compression.kind == "none"
        steady = (
            self.learner.updates_per_draw == 1 and self.optim.schedule.kind != "plateau" and not self.inputs_normalized
        )
        return self.scalable and sums and steady

    @property
    def seats(self) -> int:
        """Actors that there may be at most."""
        return max(self.all_actors, self.elastic.max_actors)

    @property
    def rank_seats(self) -> int:
        """Learner ranks that there may be at most."""
        return max(self.ranks, self.elastic.max_learners)

    @property
    def replay_parts(self) -> int:
        """Replays of their own that make up the run's: as many as there may be shards, which have them among them."""
        return max(self.replay.shards, self.elastic.max_shards)

    @property
    def why_not_fused(self) -> str:
        """What keeps this run from being one loop on one device, or several that learn as one; empty if nothing."""
        return why_not_fused(self)

    @property
    def fused(self) -> bool:
        """Whether this run is one loop on one device, or several that learn as one, rather than a pipeline."""
        return self.topology == "fused" or (self.topology == "auto" and not self.why_not_fused)

    def to_yaml(self) -> str:
        """Return the complete tree as text that `from_yaml` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_yaml(cls, path: Path) -> Experiment:
        """Load a config.yaml; refuses anything that is not one, naming the file and the field."""
        try:
            tree = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: cannot be read as a configuration ({error})") from error
        return parse_experiment(tree, str(path))


def parse_experiment(tree: Any, source: str) -> Experiment:
    """Build an experiment from plain values; errors name the source, the dotted field and the value."""
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error, Experiment)}") from None


def with_changes(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """Return the experiment with some settings changed, given by dotted name or as (nested) dictionaries.

    A changed `kind` replaces its whole section by that kind's defaults; the other changes come after.
    """
    flat = sorted(flattened(changes), key=lambda item: (not item[0].endswith(".kind"), item[0].count(".")))
    tree = experiment.model_dump(mode="json")
    for name, value in flat:
        if name.endswith(".kind"):
            _select(tree, name, value)
            tree = completed(Experiment, tree)
        else:
            _put(tree, name, value)
    tree = completed(Experiment, tree)
    place_learners(tree, [name for name, _ in flat])
    return parse_experiment(tree, "settings")


def place_learners(tree: dict[str, Any], given: Collection[str]) -> None:
    """Put a run that was given several learners, and no placement, where these are of use: into processes.

    Inline they take turns, for whoever asks for that.
    """
    several = isinstance(tree["learners"], int) and tree["learners"] > 1
    moved = "learners" in given and "placement" not in given and tree["placement"] == "inline"
    if several and moved:
        tree["placement"] = "processes"


def flattened(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings by dotted name; a whole section given as an object counts leaf by leaf."""
    for name, value in changes.items():
        if isinstance(value, Config):
            value = value.model_dump(mode="json")
        if isinstance(value, Mapping) and value and f"{prefix}{name}" != "env.kwargs":
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _select(tree: dict[str, Any], name: str, kind: Any) -> None:
    section = name.removesuffix(".kind")
    present: Any = tree
    for part in section.split("."):
        present = present.get(part) if isinstance(present, dict) else None
    if not isinstance(present, dict) or present.get("kind") != kind:
        _put(tree, section, {"kind": kind})
