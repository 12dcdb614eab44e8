"""The model directory: model.safetensors (weights) and model.json (all else that acting needs); no code in either."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor

from qfleet.algo.agent import AgentConfig
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.torsos import CustomConfig, NetworkConfig, Torso, TorsoFactory
from qfleet.core.config import Config, describe
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.failpoints import failpoint
from qfleet.core.spec import EnvSpec

FORMAT, VERSION = "qfleet-model", 1
TENSORS, DESCRIPTION = "model.safetensors", "model.json"
_ENTRIES = ("tensors_sha256", "spec", "network", "agent", "custom_class", "extra")
C = TypeVar("C", bound=Config)


class ModelConfigs(Config):
    """The settings from which a network is built again."""

    network: NetworkConfig
    """The network's settings."""
    agent: AgentConfig
    """The agent's settings, which decide on the head."""


@dataclass(frozen=True)
class Model:
    """What a model directory holds."""

    network: QNetwork
    spec: EnvSpec
    configs: ModelConfigs
    extra: dict[str, Any] = field(default_factory=dict)
    """Further plain values: the reward scale, where the model comes from, and the like."""


def save_model(
    directory: Path,
    network: QNetwork,
    spec: EnvSpec,
    configs: ModelConfigs,
    extra: dict[str, Any],
    require: Callable[[], None] = lambda: None,
) -> None:
    """Write a model directory; a reader sees the old model, the new one, or (after a crash) a refusal.

    `require` may raise at the last moment at which nothing has been replaced yet.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    content = safetensors.torch.save(tensors)
    description = {
        "format": FORMAT,
        "version": VERSION,
        "tensors_sha256": hashlib.sha256(content).hexdigest(),
        "spec": spec.model_dump(mode="json"),
        "network": configs.network.model_dump(mode="json"),
        "agent": configs.agent.model_dump(mode="json"),
        "custom_class": _custom_class(network, configs),
        "extra": extra,
    }
    description["sha256"] = _digest(description)
    staged = [
        _stage(directory / TENSORS, content),
        _stage(directory / DESCRIPTION, json.dumps(description, indent=2, allow_nan=False).encode() + b"\n"),
    ]
    require()
    for temporary, final in staged:
        os.replace(temporary, final)


def load_model(directory: Path, network: TorsoFactory | None = None) -> Model:
    """Read a model directory; a custom network needs its class. Raises CheckpointError that names the file."""
    description = _read_description(directory / DESCRIPTION)
    tensors = _read_tensors(directory / TENSORS, description["tensors_sha256"])
    spec = _settings(EnvSpec, description["spec"], directory / DESCRIPTION, "spec")
    parts = {name: description[name] for name in ModelConfigs.model_fields}
    configs = _settings(ModelConfigs, parts, directory / DESCRIPTION, "network and agent")
    if isinstance(configs.network, CustomConfig) and network is None:
        name = description["custom_class"]
        raise ConfigError(
            f"{directory} was trained with your own network class '{name}', which is not stored with the model:"
            f" pass it, as in load({str(directory)!r}, network={name})"
        )
    built = build_network(configs.network, configs.agent, spec, seed=0, custom=network)
    _load_tensors(built, tensors, directory / TENSORS)
    return Model(built.eval(), spec, configs, description["extra"])


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return a model's tensors by name, without building its network (for a warm start)."""
    return _read_tensors(directory / TENSORS, _read_description(directory / DESCRIPTION)["tensors_sha256"])


def _custom_class(network: QNetwork, configs: ModelConfigs) -> str | None:
    if not isinstance(configs.network, CustomConfig) or not isinstance(network.torso, Torso):
        return None
    return type(network.torso.body.module).__name__


def _stage(path: Path, content: bytes) -> tuple[Path, Path]:
    """Write content beside its final place and return both paths; the renames follow when all files are safe."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            failpoint("model.write")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)  # half of it would take what room there is
        raise
    return temporary, path


def _refusal(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} {problem}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise _refusal(
            path, f"cannot be read: {cause.strerror}. A model directory holds {TENSORS} and {DESCRIPTION}."
        ) from cause


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(_read(path))
    except (ValueError, RecursionError) as cause:
        raise _refusal(path, f"is damaged: {cause}") from cause
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise _refusal(path, "is not the description of a qfleet model")
    version = description.get("version")
    if not isinstance(version, int) or version < 1:
        raise _refusal(path, f"is damaged: its version is {version!r}")
    if version > VERSION:
        raise _refusal(path, f"has the version {version}; this qfleet reads up to {VERSION}: install a newer qfleet")
    if description.pop("sha256", None) != _digest(description):
        raise _refusal(path, "is damaged or was edited: its content does not have the hash written in it")
    missing = [key for key in _ENTRIES if key not in description]
    if missing:
        raise _refusal(path, f"is damaged: it has no '{missing[0]}'")
    if not isinstance(description["extra"], dict):
        raise _refusal(path, "is damaged: its 'extra' is no group of values")
    return description


def _settings(model: type[C], tree: Any, path: Path, what: str) -> C:
    try:
        return model.model_validate(tree)
    except ValidationError as cause:
        raise _refusal(path, f"has a {what} that this version cannot read: {describe(cause, model)}") from cause


def _digest(description: dict[str, Any]) -> str:
    """Return the hash of a description without its own hash, whatever the order and the white space."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    content = _read(path)
    if hashlib.sha256(content).hexdigest() != digest:
        raise _refusal(path, f"is damaged, or belongs to another {DESCRIPTION}: its hash is not the one written there")
    try:
        return dict(safetensors.torch.load(content))
    except safetensors.SafetensorError as cause:
        raise _refusal(path, f"is not a safetensors file: {cause}") from cause


@torch.no_grad()
def _load_tensors(network: QNetwork, tensors: dict[str, Tensor], path: Path) -> None:
    own = network.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in tensors or name not in own:
            owner = "the file" if name in tensors else "the network"
            raise _refusal(path, f"does not fit its network: '{name}' is only in {owner}")
        ours, stored = own[name], tensors[name]
        if (ours.shape, ours.dtype) != (stored.shape, stored.dtype):
            raise _refusal(
                path,
                f"does not fit its network: '{name}' is {stored.dtype} {tuple(stored.shape)} in the file"
                f" and {ours.dtype} {tuple(ours.shape)} in the network",
            )
        ours.copy_(stored)
