"""The Triton programs behind `losses`: each computes one loss, its priorities and its gradient in one launch.

They handle tiles [R, A]: R samples (values) or R entries of one sample's distribution (logits, quantiles). Arguments
that are None leave their part out. Sizes that loops depend on are constants of the compiled program.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pointer, rows, columns, row_stride, column_stride, inside):
    """Return float32 entries [R, A] at rows [R, 1] and columns [1, A]; 0 outside."""
    return tl.load(pointer + rows * row_stride + columns * column_stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _allow(values, mask, rows, columns, actions, inside):
    """Return values [R, A] with minus infinity where the mask forbids; a row that forbids all is left as it is."""
    if mask is not None:
        allowed = tl.load(mask + rows * actions + columns, mask=inside, other=0).to(tl.int32)
        none = tl.max(allowed, axis=1, keep_dims=True) == 0
        values = tl.where((allowed != 0) | none, values, -float("inf"))
    return tl.where(columns < actions, values, -float("inf"))


@triton.jit
def _greedy(values, columns):
    """Return 1 for the action with the largest of the values [R, A], 0 for others; like torch, NaN is the largest."""
    values = tl.where(values != values, float("inf"), values)
    return (columns == tl.argmax(values, axis=1, keep_dims=True)).to(tl.float32)


@triton.jit
def _soft_log_policy(values, temperature):
    """Return temperature * log softmax(values / temperature) [R, A]."""
    scaled = values / temperature
    scaled -= tl.max(scaled, axis=1, keep_dims=True)
    return (scaled - tl.log(tl.sum(tl.exp(scaled), axis=1, keep_dims=True))) * temperature


@triton.jit
def _bonus(values, taken, alpha, temperature, clip):
    """Return what Munchausen adds to the reward [R]: part of the clipped log-probability of the action taken."""
    chosen = tl.sum(tl.where(taken, _soft_log_policy(values, temperature), 0.0), axis=1)
    return alpha * tl.where(chosen < clip, clip, chosen)


@triton.jit
def _policy(values, columns, temperature, SOFT: tl.constexpr):
    """Return the next action's probabilities [R, A] by allowed values, and what each costs: the entropy's part."""
    if SOFT:
        cost = _soft_log_policy(values, temperature)
        policy = tl.exp(cost / temperature)
        cost = tl.where(policy == 0, 0.0, cost)
    else:
        policy = _greedy(values, columns)
        cost = tl.zeros_like(values)
    return policy, cost


@triton.jit
def _expected(following, policy, cost):
    """Return the mean [R] of the following values [R, A] under a policy; actions of probability 0 do not count."""
    return tl.sum(tl.where(policy == 0, 0.0, policy * (following - cost)), axis=1)


@triton.jit
def _huber(error, threshold):
    size = tl.abs(error)
    return tl.where(size <= threshold, 0.5 * error * error, threshold * (size - 0.5 * threshold))


@triton.jit
def _between(value, lowest, highest):
    """Return the value moved into its bounds; NaN stays NaN, so that it is noticed."""
    return tl.where(value < lowest, lowest, tl.where(value > highest, highest, value))


@triton.jit
def _importance(weight, rows, real):
    importance = real.to(tl.float32)
    if weight is not None:
        importance = tl.load(weight + rows, mask=real, other=0.0)
    return importance


@triton.jit
def _gradient_scale(loss_scale, scale):
    if loss_scale is not None:
        scale *= tl.load(loss_scale)
    return scale


@triton.jit
def _record(
    per_sample, priority, terms, metrics, ticket,
    rows, real, loss, error, importance, value, scale, batch: tl.constexpr,
):  # fmt: skip
    """Write what is known of each sample; the program that ends last adds it all up, in the same order every time."""
    tl.store(per_sample + rows, loss, mask=real)
    tl.store(priority + rows, error, mask=real)
    tl.store(terms + rows, loss * importance, mask=real)
    tl.store(terms + batch + rows, value, mask=real)
    tl.debug_barrier()  # all threads of this program have written before one of them takes the ticket
    if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        losses = tl.zeros([1024], tl.float32)
        values = tl.zeros([1024], tl.float32)
        for start in range(0, batch, 1024):
            at = start + tl.arange(0, 1024)
            losses += tl.load(terms + at, mask=at < batch, other=0.0, cache_modifier=".cg")
            values += tl.load(terms + batch + at, mask=at < batch, other=0.0, cache_modifier=".cg")
        tl.store(metrics, tl.sum(losses) * scale)
        tl.store(metrics + 1, tl.sum(values) / batch)
        tl.store(ticket, 0)


@triton.jit
def scalar_kernel(
    predicted, following, choosing, present,
    action, reward, discount, mask, next_mask, weight, loss_scale,
    per_sample, priority, gradient, terms, metrics, ticket,
    predicted_row, predicted_column, following_row, following_column, choosing_row, choosing_column,
    present_row, present_column, gradient_row, gradient_column,
    batch: tl.constexpr, actions, scale, threshold, alpha, temperature, clip,
    ROWS: tl.constexpr, ACTIONS: tl.constexpr,
):  # fmt: skip
    """Handle ROWS samples of values."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < batch
    down, columns = rows[:, None], tl.arange(0, ACTIONS)[None, :]
    inside = real[:, None] & (columns < actions)
    taken = columns == tl.load(action + rows, mask=real, other=0)[:, None]
    goal = tl.load(reward + rows, mask=real, other=0.0).to(tl.float32)
    if present is not None:
        values = _tile(present, down, columns, present_row, present_column, inside)
        goal += _bonus(_allow(values, mask, down, columns, actions, inside), taken, alpha, temperature, clip)
    if following is not None:
        reached = _tile(following, down, columns, following_row, following_column, inside)
        values = reached
        if choosing is not None:
            values = _tile(choosing, down, columns, choosing_row, choosing_column, inside)
        values = _allow(values, next_mask, down, columns, actions, inside)
        policy, cost = _policy(values, columns, temperature, present is not None)
        goal += tl.load(discount + rows, mask=real, other=0.0) * _expected(reached, policy, cost)
    values = _tile(predicted, down, columns, predicted_row, predicted_column, inside)
    value = tl.sum(tl.where(taken, values, 0.0), axis=1)

    error = value - goal
    loss = _huber(error, threshold)
    importance = _importance(weight, rows, real)
    slope = _between(error, -threshold, threshold) * importance * _gradient_scale(loss_scale, scale)
    gradient += down * gradient_row + columns * gradient_column
    tl.store(gradient, tl.where(taken, slope[:, None], 0.0), mask=inside)
    size = tl.abs(error)
    _record(per_sample, priority, terms, metrics, ticket, rows, real, loss, size, importance, value, scale, batch)


@triton.jit
def _means_of_logits(logits, support, inside):
    """Return the mean returns [1, A] of logits [N, A] over the support [N, 1]."""
    logits = tl.where(inside, logits, -float("inf"))
    likely = tl.exp(logits - tl.max(logits, axis=0, keep_dims=True))
    return tl.sum(likely * support, axis=0, keep_dims=True) / tl.sum(likely, axis=0, keep_dims=True)


@triton.jit
def _project(probability, returns, lowest, highest, atoms, ATOMS: tl.constexpr):
    """Return the probabilities [N] of the atoms nearest to those of the given returns [N, 1].

    Each atom takes from each return a share that falls linearly with their distance: no scattered writes.
    """
    place = (_between(returns, lowest, highest) - lowest) * ((atoms - 1) / (highest - lowest))
    distance = tl.abs(place - tl.arange(0, ATOMS)[None, :])
    return tl.sum(probability * tl.where(distance >= 1, 0.0, 1 - distance), axis=0)


@triton.jit
def categorical_kernel(
    predicted, following, choosing,
    support, action, reward, discount, next_mask, weight, loss_scale,
    per_sample, priority, gradient, terms, metrics, ticket,
    predicted_sample, predicted_action, predicted_atom, following_sample, following_action, following_atom,
    choosing_sample, choosing_action, choosing_atom, gradient_sample, gradient_action, gradient_atom,
    batch: tl.constexpr, actions, atoms, scale,
    ATOMS: tl.constexpr, ACTIONS: tl.constexpr,
):  # fmt: skip
    """Handle one sample of logits."""
    sample = tl.program_id(0)
    real = sample < batch
    entries, columns = tl.arange(0, ATOMS), tl.arange(0, ACTIONS)[None, :]
    down, known = entries[:, None], entries < atoms
    inside = known[:, None] & (columns < actions)
    returns = tl.load(support + entries, mask=known, other=0.0)
    following += sample * following_sample
    logits = _tile(following, down, columns, following_atom, following_action, inside)
    values = logits
    if choosing is not None:
        values = _tile(choosing + sample * choosing_sample, down, columns, choosing_atom, choosing_action, inside)
    values = _means_of_logits(values, returns[:, None], known[:, None])
    values = _allow(values, next_mask, sample, columns, actions, columns < actions)
    chosen = tl.where(known, _expected(logits, _greedy(values, columns), 0.0), -float("inf"))
    likely = tl.exp(chosen - tl.max(chosen, axis=0))
    reached = tl.load(reward + sample) + tl.load(discount + sample) * returns
    lowest, highest = tl.load(support), tl.load(support + atoms - 1)
    goal = _project((likely / tl.sum(likely, axis=0))[:, None], reached[:, None], lowest, highest, atoms, ATOMS)

    taken = tl.load(action + sample)
    predicted += sample * predicted_sample + taken * predicted_action
    logits = tl.load(predicted + entries * predicted_atom, mask=known, other=-float("inf")).to(tl.float32)
    logits -= tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits), axis=0)
    probability = tl.exp(logits) / total
    loss = -tl.sum(tl.where(known, goal * (logits - tl.log(total)), 0.0), axis=0)
    importance = _importance(weight, sample, real)
    slope = (probability * tl.sum(goal, axis=0) - goal) * importance * _gradient_scale(loss_scale, scale)
    gradient += sample * gradient_sample + down * gradient_atom + columns * gradient_action
    tl.store(gradient, tl.where(columns == taken, slope[:, None], 0.0), mask=inside)
    value = tl.sum(probability * returns, axis=0)
    _record(per_sample, priority, terms, metrics, ticket, sample, real, loss, loss, importance, value, scale, batch)


@triton.jit
def _means(pointer, columns, action_stride, entry_stride, count, actions, ENTRIES: tl.constexpr):
    """Return the means [1, A] of one sample's entries."""
    entries = tl.arange(0, ENTRIES)[:, None]
    inside = (entries < count) & (columns < actions)
    return tl.sum(_tile(pointer, entries, columns, entry_stride, action_stride, inside), axis=0, keep_dims=True) / count


@triton.jit
def quantile_kernel(
    predicted, following, choosing, present,
    taus, action, reward, discount, mask, next_mask, weight, loss_scale,
    per_sample, priority, gradient, terms, metrics, ticket,
    predicted_sample, predicted_action, predicted_entry, following_sample, following_action, following_entry,
    choosing_sample, choosing_action, choosing_entry, present_sample, present_action, present_entry,
    gradient_sample, gradient_action, gradient_entry, taus_sample,
    batch: tl.constexpr, actions, predictions, goals: tl.constexpr, choosing_count, present_count, scale,
    threshold, alpha, temperature, clip,
    ENTRIES: tl.constexpr, GOALS: tl.constexpr, ACTIONS: tl.constexpr,
):  # fmt: skip
    """Handle one sample of quantiles."""
    sample = tl.program_id(0)
    real = sample < batch
    entries, columns = tl.arange(0, ENTRIES), tl.arange(0, ACTIONS)[None, :]
    known, legal = entries < predictions, columns < actions
    taken = tl.load(action + sample)
    base = tl.load(reward + sample).to(tl.float32)
    if present is not None:
        present += sample * present_sample
        values = _means(present, columns, present_action, present_entry, present_count, actions, ENTRIES)
        values = _allow(values, mask, sample, columns, actions, legal)
        base += tl.sum(_bonus(values, columns == taken, alpha, temperature, clip), axis=0)
    choosing += sample * choosing_sample
    values = _means(choosing, columns, choosing_action, choosing_entry, choosing_count, actions, ENTRIES)
    values = _allow(values, next_mask, sample, columns, actions, legal)
    policy, cost = _policy(values, columns, temperature, present is not None)

    following += sample * following_sample
    predicted += sample * predicted_sample + taken * predicted_action
    quantiles = tl.load(predicted + entries * predicted_entry, mask=known, other=0.0).to(tl.float32)
    fractions = tl.load(taus + sample * taus_sample + entries, mask=known, other=0.0)
    decay = tl.load(discount + sample)
    losses = tl.zeros([ENTRIES], tl.float32)
    slopes = tl.zeros([ENTRIES], tl.float32)
    for start in range(0, goals, GOALS):
        at = start + tl.arange(0, GOALS)
        inside = (at < goals)[:, None] & legal
        reached = _tile(following, at[:, None], columns, following_entry, following_action, inside)
        error = quantiles[:, None] - (base + decay * _expected(reached, policy, cost))[None, :]
        side = tl.abs(fractions[:, None] - (error > 0).to(tl.float32))
        side = tl.where((at < goals)[None, :], side, 0.0)
        losses += tl.sum(side * _huber(error, threshold), axis=1)
        slopes += tl.sum(side * _between(error, -threshold, threshold), axis=1)
    share = 1 / (goals * threshold)
    loss = tl.sum(tl.where(known, losses, 0.0), axis=0) * share
    importance = _importance(weight, sample, real)
    slopes *= share * importance * _gradient_scale(loss_scale, scale)
    gradient += sample * gradient_sample + entries[:, None] * gradient_entry + columns * gradient_action
    tl.store(gradient, tl.where(columns == taken, slopes[:, None], 0.0), mask=known[:, None] & legal)
    value = tl.sum(quantiles, axis=0) / predictions
    _record(per_sample, priority, terms, metrics, ticket, sample, real, loss, loss, importance, value, scale, batch)
