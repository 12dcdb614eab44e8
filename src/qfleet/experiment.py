"""The settings of a whole run as one tree, and the checks that cross its sections."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import AgentConfig, ReplayAgent, RolloutAgent
from qfleet.algo.exploration import EpsilonGreedyConfig, ExplorationConfig
from qfleet.algo.networks import NetworkConfig
from qfleet.algo.optim import AdamConfig, OptimConfig
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.config import Config, completed, describe
from qfleet.core.errors import ConfigError
from qfleet.envs import EnvConfig
from qfleet.parallel.plan import ParallelConfig
from qfleet.parallel.serving import ServerConfig
from qfleet.replay import ReplayConfig
from qfleet.roles.actor import ActorConfig
from qfleet.roles.evaluator import EvaluationConfig
from qfleet.roles.inference_server import InferenceConfig, LocalInference, ServedInference
from qfleet.roles.learner_setup import LearnerConfig
from qfleet.roles.seats import ElasticConfig


class CheckpointConfig(Config):
    """When a run is saved."""

    every: int = Field(50_000, gt=0)
    """Environment steps between two checkpoints."""
    every_s: float = Field(300.0, gt=0)
    """Seconds between two checkpoints at most; saving changes nothing in what a run learns."""
    keep: int = Field(2, gt=0)
    """Checkpoints that stay; the oldest go first."""
    target: str | None = None
    """Where each checkpoint is copied besides, as an address of fsspec (`s3://bucket/run`, `file:///mnt/run`): it
    counts as saved only when it is there, too. `qfleet resume ADDRESS` goes on from it on any machine."""


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
    track: TrackConfig = TrackConfig()
    """Where metrics go."""
    warm_start: str | None = None
    """Directory of a qfleet model whose weights the network begins with."""
    warm_start_part: Literal["all", "torso"] = "all"
    """What is taken over from that model: everything that fits, or the torso only."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Experiment:
        for wrong, message in self._contradictions():
            if wrong:
                raise ValueError(message)
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        replaying = isinstance(self.agent, ReplayAgent)
        prioritised = self.replay.sampler.kind == "prioritised"
        noisy = isinstance(self.agent, ReplayAgent) and self.agent.noisy
        learner, memory, shards = self.learner, self._memory, self.replay.shards
        drawn = learner.updates_per_draw
        times = "" if drawn == 1 else f" times learner.updates_per_draw {drawn}"
        ordered = self.lockstep and self.placement != "inline"
        servers = self.inference.servers if isinstance(self.inference, ServedInference) else 0
        # Twice a sequence for each environment, since whole segments of rows are dropped.
        sequences = 2 * (memory.burn_in + memory.length + 1) * self.seats * self.actor.envs if memory else 0
        return [
            *self.elastic.contradictions(
                self.actors, self.all_actors, self.learners, shards, learner.batch_size, self.scalable, self.regroupable
            ),
            *self.parallel.contradictions(self.learners, learner.batch_size, replaying and not memory),
            (self.agent.kind == "tabular" and self.network.kind != "tabular",
             f"agent.kind 'tabular' needs network.kind 'tabular', not '{self.network.kind}'"),
            (self.agent.kind != "tabular" and self.network.kind == "tabular",
             f"network.kind 'tabular' needs agent.kind 'tabular', not '{self.agent.kind}'"),
            (prioritised and not replaying,
             f"replay.sampler.kind 'prioritised' needs agent.kind 'replay'; '{self.agent.kind}' has no replay"),
            (self.normalise_rewards and not replaying,
             f"normalise_rewards needs agent.kind 'replay', not '{self.agent.kind}'"),
            (learner.evaluated == "target" and not replaying,
             f"learner.evaluated 'target' needs agent.kind 'replay': '{self.agent.kind}' has no target network"),
            (replaying and learner.batch_size > self.replay.capacity,
             f"learner.batch_size {learner.batch_size} exceeds replay.capacity {self.replay.capacity}"),
            (drawn > 1 and (not replaying or memory is not None),
             f"learner.updates_per_draw {drawn} is for agents that learn from transitions of a replay: set it to 1"),
            (drawn > 1 and self.serving is not None,
             f"learner.updates_per_draw {drawn} is for learners, not for parallel.update.kind 'server': set it to 1"),
            (drawn > 1 and learner.batch_size % self.learners != 0,
             f"learner.updates_per_draw {drawn} needs a learner.batch_size that is a multiple of learners"
             f" {self.learners}, not {learner.batch_size}"),
            (drawn > 1 and self.parallel.after_death == "fewer",
             f"learner.updates_per_draw {drawn} needs equal parts, which parallel.after_death 'fewer' may not leave:"
             " set one of them to its default"),
            (replaying and learner.learning_starts > self.replay.capacity,
             f"learner.learning_starts {learner.learning_starts} exceeds replay.capacity {self.replay.capacity}:"
             " learning would never start"),
            (replaying and learner.learning_starts >= self.env_steps,
             f"learner.learning_starts {learner.learning_starts} is not below env_steps {self.env_steps}:"
             " nothing would be learned"),
            (replaying and 0 < self.env_steps - learner.learning_starts < drawn * learner.train_period,
             f"learner.train_period {learner.train_period}{times} exceeds the"
             f" {self.env_steps - learner.learning_starts} steps that env_steps leaves after learner.learning_starts:"
             " nothing would be learned"),
            (replaying and self.exploration.kind == "none" and not noisy,
             "exploration.kind 'none' needs agent.noisy True: nothing else would make the agent explore"),
            (self.learners > 1 and not replaying and not self.fused,
             f"learners {self.learners} of agent.kind '{self.agent.kind}' need the fused topology, which"
             f" {self.why_not_fused or 'topology pipeline rules out'}"),
            (self.learners > 1 and self._normalized,
             "network.input.normalize needs one learner: ranks would see other statistics; use network.input.scale"),
            (self.ranks > 1 and self.optim.schedule.kind == "plateau",
             "optim.schedule.kind 'plateau' needs one learner: ranks would hear of a score at different updates"),
            (replaying and self.learners > learner.batch_size,
             f"learners {self.learners} exceeds learner.batch_size {learner.batch_size}: some would have no work"),
            (shards > 1 and not replaying,
             f"replay.shards {shards} needs agent.kind 'replay'; '{self.agent.kind}' has no replay"),
            (shards > self.actors,
             f"replay.shards {shards} exceeds actors {self.actors}: some would have no work"),
            (self.replay_parts > 1 and self.normalise_rewards,
             f"normalise_rewards needs one replay shard, not {self.replay_parts}: shards would see other statistics;"
             " use env.reward_scale"),
            (self.strict and self.placement != "inline",
             f"strict is for placement 'inline': '{self.placement}' sends every message through the serialiser anyway"),
            (self.address is not None and self.placement != "ray",
             f"address needs placement 'ray', not '{self.placement}'"),
            (bool(self.actor_resources) and self.placement != "ray",
             f"actor_resources needs placement 'ray', not '{self.placement}'"),
            (self.parallel.across_nodes and (self.placement != "ray" or self.rank_seats == 1 or not self.whole_ranks),
             "parallel.across_nodes is for a group of learners (learners 2 or more, or elastic.max_learners) with whole"
             " networks that sum their gradients or meet, in placement 'ray'"),
            (ordered and self.ranks > 1,
             f"lockstep needs one learner, not {self.ranks}: the ranks of a group step together"),
            (ordered and servers > 0,
             "lockstep needs inference.kind 'local': a server's batches depend on the time"),
            (ordered and self.actor.groups > 1,
             f"lockstep needs actor.groups 1, not {self.actor.groups}: environments must step in a fixed order"),
            (servers > 0 and not replaying,
             f"inference.kind 'served' needs agent.kind 'replay', not '{self.agent.kind}'"),
            (self.actor.groups > 1 and not replaying,
             f"actor.groups {self.actor.groups} needs agent.kind 'replay', not '{self.agent.kind}'"),
            (self.actor.groups > self.actor.envs,
             f"actor.groups {self.actor.groups} exceeds actor.envs {self.actor.envs}: some would have no environments"),
            (self.inference.precision != "fp32" and memory is not None,
             f"inference.precision '{self.inference.precision}' is for networks without memory, not with agent.memory"),
            (self.spare_actors > 0 and not self.balanced,
             f"spare_actors {self.spare_actors} needs a balancer to wake them: balance 'on', agent.kind 'replay', and"
             " placement 'processes' or 'ray' without lockstep"),
            (servers > self.actors,
             f"inference.servers {servers} exceeds actors {self.actors}: some would have no work"),
            (isinstance(self.agent, RolloutAgent) and self._rollout < self.agent.minibatches,
             f"agent.minibatches {getattr(self.agent, 'minibatches', 0)} exceeds the {self._rollout} samples of a"
             " learner's rollout (actor.envs times agent.rollout_length): some would be empty"),
            (replaying and self.fused and self.env_steps <= self.actor.envs * (getattr(self.agent, "n_step", 1) + 2),
             f"env_steps {self.env_steps} ends before the environments (actor.envs {self.actor.envs}) have made their"
             f" first windows of agent.n_step {getattr(self.agent, 'n_step', 1)}: nothing would be learned"),
            (memory is not None and self.values_by_actors,
             "replay.sampler.initial 'actor' is for single transitions: agent.memory needs 'maximum'"),
            (self.replay.capacity < sequences,
             f"replay.capacity {self.replay.capacity} is too small for the sequences of agent.memory: its length and"
             f" burn_in need {sequences} rows or more for {self.seats * self.actor.envs} environments"),
            (self.topology == "fused" and bool(self.why_not_fused),
             f"topology 'fused' {self.why_not_fused}"),
        ]  # fmt: skip

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
    def whole_ranks(self) -> bool:
        """Whether learners are the ranks of a group in which each has a whole network."""
        return self.serving is None and not self.fused and not self.parallel.in_pieces

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
    def _memory(self) -> MemoryConfig | None:
        """The memory of a recurrent agent."""
        return self.agent.memory if isinstance(self.agent, ReplayAgent) else None

    @property
    def _normalized(self) -> bool:
        """Whether the network scales its inputs by what it has seen of them."""
        return bool(getattr(getattr(self.network, "input", None), "normalize", False))

    @property
    def _rollout(self) -> int:
        """Samples of one learner's rollout, for an agent that learns from those."""
        ticks = self.agent.rollout_length if isinstance(self.agent, RolloutAgent) else 1
        return self.actor.envs // self.learners * ticks

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
        steady = self.learner.updates_per_draw == 1 and self.optim.schedule.kind != "plateau" and not self._normalized
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
        several, envs, batch = self.learners, self.actor.envs, self.learner.batch_size
        reasons = {
            f"needs a tensor-native environment (env.kind 'tensor', as in the preset 'cartpole' or with"
            f" --env.kind tensor --env.game maze), not env.kind '{self.env.kind}'": self.env.kind != "tensor",
            f"has no placement '{self.placement}' for one learner: it is one loop in this process":
                several == 1 and self.placement != "inline",
            f"needs placement 'processes' or 'inline' for learners {several}, not 'ray'": self.placement == "ray",
            f"has one loop for each learner that also acts: actors {self.actors} is for a pipeline": self.actors > 1,
            "has no parameter servers": self.serving is not None,
            "has a fixed number of loops: elastic.max_actors, max_learners and max_shards are for a pipeline":
                max(self.elastic.max_actors - self.actors, self.elastic.max_learners - several) > 0
                or self.elastic.max_shards > 1,
            "has whole networks, which parallel.tensor, parallel.pipeline and parallel.update.kind 'sharded' divide":
                self.parallel.in_pieces,
            "keeps all of its loops: parallel.after_death 'fewer' is for a pipeline":
                self.parallel.after_death == "fewer",
            f"has equal shares: actor.envs {envs} is not a multiple of learners {several}": envs % several != 0,
            f"has equal shares: learner.batch_size {batch} is not a multiple of learners {several}":
                batch % several != 0 and self.agent.kind == "replay",
            f"has one replay, not replay.shards {self.replay.shards}": self.replay.shards > 1,
            "has no table: use agent.kind 'replay' or 'rollout'": self.agent.kind == "tabular",
            "has no replay of sequences, which agent.memory learns from": self._memory is not None,
            "cannot normalise rewards; set env.reward_scale": self.normalise_rewards,
            "computes in float64 in places, which device 'mps' does not have": self.device == "mps",
            f"keeps its replay on the device, not in replay.storage.kind '{self.replay.storage.kind}'":
                self.replay.storage.kind != "ram",
            "sends no messages that strict could check": self.strict,
            "acts on its own device: inference.kind 'served' is for a pipeline": self.inference.kind == "served",
            f"acts in accel.precision: inference.precision '{self.inference.precision}' is for a pipeline":
                self.inference.precision != "fp32",
            "gives new items the maximum: replay.sampler.initial 'actor' is for a pipeline": self.values_by_actors,
            f"acts for all environments at once, not in actor.groups {self.actor.groups}": self.actor.groups > 1,
        }  # fmt: skip
        return next((reason for reason, true in reasons.items() if true), "")

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
