"""A trained network as a user sees it: raw observations in, greedy actions or values out, NumPy on both sides."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from qfleet.algo.batch import leaves_to_tensors
from qfleet.algo.networks import QNetwork
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Array, Bools, Floats, Leaves

MASK = "action_mask"
"""The name under which Dict observations carry the mask of allowed actions."""


class Policy:
    """Plays greedily. Observations come in the environment's own form: an array [B, ...], or for Dict spaces a dict.

    A single observation without the batch axis is answered by a single action.
    """

    def __init__(self, network: QNetwork, spec: EnvSpec) -> None:
        self.network, self.spec = network.eval(), spec
        self._device = next(network.parameters()).device

    def initial_state(self, count: int) -> Any:
        """Return the memory of `count` agents before their first observation; () for networks without memory.

        It is an array [count, S] of zeros: set an agent's row to 0 when a new episode begins for it.
        """
        return self.network.initial_state(count).numpy() if self.network.recurrent else ()

    def act(self, observations: Any, state: Any = None, mask: Any = None) -> Any:
        """Return the best actions, as the environment takes them: [B], or [B, parts] for MultiDiscrete.

        The mask [B, A] tells allowed joint actions; an environment with masks needs it, unless its Dict observation
        carries it as "action_mask". With a state, return (actions, next state); agents with memory need one.
        """
        leaves, allowed, single = self._read(observations, mask)
        if self.spec.masked and allowed is None:
            raise ValueError(f"{self.spec.name} restricts its actions: pass mask=, with the shape (batch, actions)")
        values, following = self._values(leaves, state)
        joint = (values if allowed is None else np.where(allowed, values, -np.inf)).argmax(1)
        if self.network.recurrent:
            following[:, -1] = joint + 1
        action = np.stack(np.unravel_index(joint, self.spec.action_shape), axis=1) if self.spec.action_shape else joint
        action = action + self.spec.action_start
        if single:
            action = action[0]
        return action if state is None else (action, following)

    def q(self, observations: Any, state: Any = None) -> Floats:
        """Return the values [B, A] of all joint actions, or [A] for a single observation."""
        leaves, _, single = self._read(observations, None)
        values, _ = self._values(leaves, state)
        return values[0] if single else values

    def _values(self, leaves: Leaves, state: Any) -> tuple[Floats, Any]:
        """Return the values [B, A], and for a network with memory what it remembers then."""
        with torch.inference_mode():
            tensors = leaves_to_tensors(leaves, self._device)
            if not self.network.recurrent:
                return _numbers(self.network.q(tensors)), state
            before = self._as_state(state, len(next(iter(leaves.values()))))
            q, after = self.network.recall(tensors, torch.from_numpy(before).to(self._device))
            return _numbers(q), _numbers(after)

    def _as_state(self, state: Any, size: int) -> Floats:
        if state is None:
            raise ValueError(
                "this agent has a memory: pass state=policy.initial_state(n) at the start of an episode, and then the"
                " state that act() returned with the actions"
            )
        array = np.array(state, np.float32)
        expected = tuple(self.network.initial_state(size).shape)
        if array.shape != expected:
            raise ValueError(
                f"the state must have the shape {expected}, as initial_state({size}) has, not {array.shape}"
            )
        return array

    def _read(self, observations: Any, mask: Any) -> tuple[Leaves, Bools | None, bool]:
        """Return batched leaves, the batched mask, and whether the observation came without a batch axis."""
        given = _flatten(observations, self.spec.observations)
        if mask is None and self.spec.masked and MASK not in self.spec.observations:
            mask = given.pop(MASK, None)
        if self.spec.plain and len(given) == 1:
            given = {PLAIN: next(iter(given.values()))}
        if set(given) != set(self.spec.observations):
            raise ValueError(f"{self.spec.name} has the observations {list(self.spec.observations)}, not {list(given)}")
        leaves = {name: _as_leaf(name, given[name], leaf) for name, leaf in self.spec.observations.items()}
        single = all(leaves[name].ndim == len(leaf.shape) for name, leaf in self.spec.observations.items())
        if single:
            leaves = {name: leaf[None] for name, leaf in leaves.items()}
        sizes = {len(leaf) for leaf in leaves.values()}
        if len(sizes) != 1 or any(leaves[n].ndim != len(s.shape) + 1 for n, s in self.spec.observations.items()):
            raise ValueError(f"the observations of {self.spec.name} differ in their batch axis")
        return leaves, None if mask is None else self._as_mask(mask, sizes.pop()), single

    def _as_mask(self, mask: Any, size: int) -> Bools:
        allowed = np.atleast_2d(np.asarray(mask, bool))
        if allowed.shape != (size, self.spec.actions):
            raise ValueError(f"the mask must have the shape {(size, self.spec.actions)}, not {allowed.shape}")
        if not allowed.any(axis=1).all():
            raise ValueError(f"the mask of observation {np.flatnonzero(~allowed.any(axis=1))[0]} allows no action")
        return allowed


def _numbers(tensor: torch.Tensor) -> Floats:
    return np.array(tensor.cpu().numpy(), np.float32)


def _flatten(observations: Any, known: Container[str], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts and tuples by their dotted names; a tuple in place of a leaf is an array."""
    if isinstance(observations, Mapping):
        entries: Sequence[tuple[str, Any]] = [(str(name), value) for name, value in observations.items()]
    elif isinstance(observations, tuple) and (prefix or PLAIN) not in known:
        entries = [(str(number), value) for number, value in enumerate(observations)]
    else:
        return {prefix or PLAIN: observations}
    return {
        name: leaf
        for key, value in entries
        for name, leaf in _flatten(value, known, f"{prefix}.{key}" if prefix else key).items()
    }


def _as_leaf(name: str, value: Any, leaf: LeafSpec) -> Array:
    """Return what the network takes for one leaf; raises ValueError for values that it was never trained on."""
    array, dtype = _as_numbers(name, value), np.dtype(leaf.dtype)
    if array.dtype.kind == "f" and dtype.kind != "f":
        raise ValueError(
            f"'{name}' is {array.dtype} but the model was trained on raw {leaf.dtype}: pass it unscaled and not"
            " converted, as the environment gives it"
        )
    shape = array.shape[-len(leaf.shape) :] if leaf.shape else ()
    if shape != leaf.shape or array.ndim not in (len(leaf.shape), len(leaf.shape) + 1):
        raise ValueError(
            f"'{name}' has the shape {array.shape}; the model takes {leaf.shape}, or a batch axis before that"
        )
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused below with its place
        converted: Array = np.ascontiguousarray(array, dtype).reshape(array.shape)
    if array.dtype.kind != "f" and array.dtype != dtype:
        _refuse(name, array, converted != array, f", which {dtype} cannot hold")
    if dtype.kind == "f":
        _refuse(name, converted, ~np.isfinite(converted), f" as {dtype}: the model takes finite numbers")
    if leaf.categories is not None:
        outside = (array < leaf.start) | (array >= leaf.start + leaf.categories)  # type: ignore[operator]  # whole
        _refuse(name, array, outside, f"; it has {leaf.categories} categories, the first is {leaf.start}")
    return converted - dtype.type(leaf.start) if leaf.start else converted


def _as_numbers(name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"'{name}' must be numbers in a regular array: {error}") from None
    if array.dtype.kind not in "biuf":
        given = f"an array of {array.dtype}" if array.ndim else type(value).__name__
        raise ValueError(f"'{name}' must be numbers, not {given}")
    return array


def _refuse(name: str, array: Array, bad: Any, why: str) -> None:
    """Raise ValueError for the first value where `bad` is true, with its place."""
    if bad.any():
        place = np.argwhere(bad)[0].tolist()
        at = f" at {place}" if place else ""
        raise ValueError(f"'{name}' is {array[tuple(place)]}{at}{why}")
