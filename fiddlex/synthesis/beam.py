"""Builds schedules tick by tick for the lockstep clock, and keeps the best after each tick: a beam search.

In each tick every rank runs one action that is ready, or waits for one. A partial schedule is continued under many
preferences: which kind of action and which stage goes first, how many microbatches a stage lets in ahead of their
backward passes, and how long the tick should be, since a tick lasts as long as its longest action. All ranks have the
same preference in a tick, and may have another one in the next. Of the partial schedules of as many ticks, those go on
whose time so far and least time to come are shortest. Microbatches are alike, so what matters of a partial schedule is
how many actions of each kind and stage have begun.

Sums are made in one order, not as products of matrices, whose sums differ between machines in the last digit, which can
decide between two partial schedules.

A rank never waits while the action that it runs next is ready, because `fiddlex.schedules.ticks` would not let it wait
either. Invariant: the result is a legal schedule, and within the caps where that of `greedy` is.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.simulate.lockstep import slowed_down
from fiddlex.synthesis.greedy import limits, room_for_forwards
from fiddlex.synthesis.problem import ROUNDING, Problem

MOST_LENGTHS = 5  # lengths of ticks that are tried, besides any length
AHEAD = (0, 2, math.inf)  # microbatches that a stage lets in beyond a round trip
WASTE = 0.1  # weight of the time that ranks waste on average, beside that of the busiest rank
DIGITS = 9  # to which scores are rounded, so that those that differ by the rounding of sums alone are equal

_F, _I, _W = range(3)
_ORDERS = ((_F, _I, _W), (_I, _F, _W), (_I, _W, _F), (_W, _I, _F))  # kinds, the one that goes first first


class _Partials(NamedTuple):
    """Partial schedules, all of as many ticks."""

    counts: np.ndarray  # actions that have begun, int [partial, stage, kind]
    time: np.ndarray  # when the next tick starts, float [partial]
    # how long after the start of the next tick the last gradient arrives at each rank, [partial, rank]
    arrives: np.ndarray
    # bool [partial, stage]: the stage's rank waited though its F was ready, so it runs something else next
    waits: np.ndarray

    def take(self, numbers: np.ndarray) -> "_Partials":
        return _Partials(*(column[numbers] for column in self))


class _Tick(NamedTuple):
    """What the partial schedules that were kept ran in one tick."""

    parents: np.ndarray  # the partial schedule of the tick before that each one continues, int [partial]
    actions: np.ndarray  # stage × 3 + kind of each rank's action, −1 where it waits, int [partial, rank]


def search(problem: Problem, *, width: int, splits: bool = True, name: str = "auto") -> Schedule | None:
    """The best schedule with one action of a rank per tick that a beam search finds; None if it finds none.

    After each tick `width` partial schedules go on. Backward passes are I and W if `splits`, or B. No clock is used.
    """
    return _Beam(problem, width, splits).run(name)


class _Beam:
    """The search; arrays over stages and kinds have the kinds F, I and W in this order.

    With whole backward passes an I stands for the B, and a W begins with it and takes no time.
    """

    def __init__(self, problem: Problem, width: int, splits: bool):
        self._problem, self._width, self._splits = problem, width, splits
        self._placement = placement = np.asarray(problem.placement)
        self._durations = np.stack([problem.durations[kind] for kind in (Kind.F, Kind.I, Kind.W)], axis=1)
        if not splits:
            self._durations[:, _I] += self._durations[:, _W]
            self._durations[:, _W] = 0.0
        most = max(map(len, problem.stages_of))
        self._slots = np.asarray([(*own, *own[-1:] * (most - len(own))) for own in problem.stages_of])
        self._by_rank = np.concatenate(problem.stages_of)
        self._begins = np.cumsum([0, *map(len, problem.stages_of[:-1])])  # of each rank's stages among these
        self._first, self._last = (np.asarray([own[end] for own in problem.stages_of]) for end in (0, -1))
        hops = np.asarray(problem.costs.per_stage(problem.num_stages)["hop"])
        leaves = placement[1:] != placement[:-1]
        self._activation_hops = np.where(np.append(leaves, False), hops, 0.0)  # of each sending stage
        self._gradient_hops = np.where(np.insert(leaves, 0, False), hops, 0.0)
        self._activation, self._left = np.asarray(problem.activation), splits * np.asarray(problem.weight_gradient)
        self._later = np.asarray(problem.later)
        self._caps = np.asarray(problem.caps) * (1 + ROUNDING)
        self._room = np.asarray(room_for_forwards(problem, splits=splits))
        self._shares = self._activation / self._caps[placement]  # of a rank's cap that a microbatch of a stage takes
        self._orders = self._all_orders()  # [order, stage, kind]
        self._limits = np.asarray([limits(problem, ahead) for ahead in AHEAD])  # [limit, stage]
        self._lengths = self._lengths_of_ticks()
        choices = len(self._orders), len(AHEAD), len(self._lengths)
        self._preferences = np.asarray(list(itertools.product(*map(range, choices))))
        self._heads = np.asarray([self._durations[: own[0], _F].sum() for own in problem.stages_of])
        self._tails = np.asarray(
            [self._durations[: own[0], _I].sum() + self._durations[0, _W] * (own[0] > 0) for own in problem.stages_of]
        )

    def run(self, name: str) -> Schedule | None:
        problem, ticks = self._problem, list[_Tick]()
        ranks, shape = problem.num_ranks, (1, problem.num_stages, 3)
        now = _Partials(np.zeros(shape, int), np.zeros(1), np.zeros((1, ranks)), np.zeros(shape[:2], bool))
        best: tuple[float, int, int] | None = None  # time, tick, number of the partial schedule
        while len(now.time):
            after, tick = self._continued(now)
            ends = (after.counts == problem.num_microbatches).all(axis=(1, 2))
            scores, least = self._scores(after)
            shorter = best[0] * (1 - ROUNDING) if best else math.inf
            goes_on = np.flatnonzero(~ends & (least < shorter))
            goes_on = goes_on[np.argsort(scores[goes_on], kind="stable")[: self._width]]
            kept = goes_on
            if ends.any():
                end = np.flatnonzero(ends)[np.argmin(after.time[ends])]
                if best is None or after.time[end] < best[0] * (1 - ROUNDING):
                    best, kept = (float(after.time[end]), len(ticks), len(goes_on)), np.append(goes_on, end)
            ticks.append(_Tick(tick.parents[kept], tick.actions[kept]))
            now = after.take(goes_on)
        return self._schedule(ticks[: best[1] + 1], best[2], name) if best else None

    def _continued(self, now: _Partials) -> tuple[_Partials, _Tick]:
        """All different partial schedules that are one tick longer, the fastest of each kind."""
        durations = self._durations_in(now)
        parents, actions, waits = self._chosen(now, durations)
        runs = actions >= 0
        counts = now.counts[parents].reshape(len(parents), 3 * self._problem.num_stages)
        numbers = np.nonzero(runs)
        counts[numbers[0], actions[runs]] += 1
        if not self._splits:
            counts[:, _W::3] = counts[:, _I::3]
        lengths = np.where(runs, np.take_along_axis(durations.reshape(len(now.time), -1)[parents], actions, axis=1), 0)
        arrives = now.arrives[parents]
        if self._problem.costs.sharing:
            lengths = slowed_down(lengths, self._problem.costs.sharing)
        time = now.time[parents] + np.maximum(lengths, arrives).max(axis=1) + self._shared(actions)
        after = _Partials(counts.reshape(-1, self._problem.num_stages, 3), time, self._arrivals(actions), waits)
        state = np.concatenate([counts, after.arrives > 0, waits], axis=1)
        order = np.argsort(time, kind="stable")
        fastest = order[_different(state[order])]
        return after.take(fastest), _Tick(parents[fastest], actions[fastest])

    def _durations_in(self, now: _Partials) -> np.ndarray:
        """How long a tick is in which each action runs, float [partial, stage, kind]."""
        durations = np.repeat(self._durations[None], len(now.time), axis=0)
        durations[..., _F] += self._activation_hops
        durations[..., _I:] += now.arrives[:, self._placement, None]
        return durations

    def _chosen(self, now: _Partials, durations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What ranks run under all preferences, without repetitions: parents, actions [child, rank], waits."""
        ready = self._ready(now)  # [partial, stage, kind]
        ahead = now.counts[..., _F] - now.counts[..., _I]
        under = ahead[:, None] < self._limits  # [partial, limit, stage]
        order, limit, length = self._preferences.T
        number, ranks = len(now.time), self._problem.num_ranks
        short = durations[:, None] <= self._lengths[:, None, None]  # [partial, length, stage, kind]
        scores = self._orders[order] + 2.0 * short[:, length]  # those that are short enough go first
        scores *= ready[:, None]
        scores[..., _F] *= under[:, limit]
        of_ranks = scores[:, :, self._slots].reshape(number * len(order), ranks, -1)
        best = of_ranks.argmax(axis=2)
        runs = np.take_along_axis(of_ranks, best[..., None], axis=2)[..., 0] > 0
        actions = np.where(runs, 3 * self._slots[np.arange(ranks), best // 3] + best % 3, -1)
        parents = np.repeat(np.arange(number), len(order))
        different = np.flatnonzero(runs.any(axis=1))
        different = different[_different(np.concatenate([parents[:, None], actions], axis=1)[different])]
        parents, actions = parents[different], actions[different]
        waits = (actions < 0)[:, self._placement] & (ready[..., _F] | now.waits)[parents]
        return parents, actions, waits

    def _ready(self, now: _Partials) -> np.ndarray:
        """Whether an action may begin, as far as other actions and the memory allow, bool [partial, stage, kind]."""
        f, i, w = np.moveaxis(now.counts, -1, 0)
        home, stages = self._placement, np.arange(len(self._placement))
        activations = self._activation * (f - w)
        held = self._of_ranks(activations + self._left * (i - w))
        unsure = self._of_ranks(self._activation * (f - f[:, self._last[home]]))
        held_after, unsure_after = (each[:, home] + self._activation for each in (held, unsure))
        room = (held_after <= self._room[home]) & (unsure_after + self._later <= self._room[home])
        before = np.where(stages > 0, np.roll(f, 1, axis=1), self._problem.num_microbatches)
        after = np.where(stages < stages[-1], np.roll(i, -1, axis=1), f)
        none_waits = self._of_ranks(i - w) == 0
        space = (held[:, home] + self._left <= self._caps[home]) | none_waits[:, home]
        return np.stack([(f < before) & room & ~now.waits, (i < after) & space, w < i], axis=-1)

    def _shared(self, actions: np.ndarray) -> np.ndarray:
        """The time in which all ranks embed and score in a tick, and what a tick adds."""
        costs, last = self._problem.costs, self._problem.num_stages - 1
        edges = ((_F, costs.embed), (3 * last + _F, costs.head), (_I, costs.embed_backward))
        return costs.tick + sum(cost * (actions == action).any(axis=1) for action, cost in edges)

    def _arrivals(self, actions: np.ndarray) -> np.ndarray:
        """How long after the start of the next tick gradients arrive at each rank, [child, rank]."""
        arrives = np.zeros(actions.shape)
        children, ranks = np.nonzero((actions >= 0) & (actions % 3 == _I))
        stages = actions[children, ranks] // 3
        np.maximum.at(arrives, (children, self._placement[stages - 1]), self._gradient_hops[stages])
        return arrives

    def _scores(self, after: _Partials) -> tuple[np.ndarray, np.ndarray]:
        """How promising partial schedules are, less being better, and the least time at which they can end."""
        costs, m = self._problem.costs, self._problem.num_microbatches
        left = (m - after.counts) * self._durations
        work, weights = self._of_ranks(left.sum(axis=2)), self._of_ranks(left[..., _W])
        begun = (after.counts[..., _F] > 0).sum(axis=1)  # the first stages
        reached = np.concatenate([[0.0], np.cumsum(self._durations[:, _F])])[begun]
        head = np.maximum(self._heads - reached[:, None], 0.0)  # a rank whose first F has not begun waits for it
        tail = np.where(after.counts[:, self._first, _I] < m, self._tails, 0.0)  # other ranks run after its last I
        f, i = after.counts[..., _F], after.counts[..., _I]
        shared = (m - f[:, 0]) * costs.embed + (m - f[:, -1]) * costs.head + (m - i[:, 0]) * costs.embed_backward
        stays = self._stays(after, left)
        least = after.time + np.maximum(
            shared + np.maximum(work + head, work - weights + tail).max(axis=1), stays.max(axis=1)
        )
        average = after.time + shared + work.mean(axis=1)
        scale = 10.0**DIGITS / max(float(self._durations.sum()) * m, 1e-300)
        return np.round((least + WASTE * average) * scale), least

    def _stays(self, after: _Partials, left: np.ndarray) -> np.ndarray:
        """The least time in which each rank's memory holds what it still has to hold, [partial, rank].

        A microbatch stays on a stage's rank from its F there until it has come back from the last stage, and for a W.
        """
        f, i = np.moveaxis(self._problem.num_microbatches - after.counts[..., :_W], -1, 0)
        back = i * self._gradient_hops
        passes = left[..., _F] + f * self._activation_hops + left[..., _I] + back
        from_here = np.cumsum(passes[:, ::-1], axis=1)[:, ::-1]
        return self._of_ranks(self._shares * (from_here - back + left[..., _W]))

    def _of_ranks(self, of_stages: np.ndarray) -> np.ndarray:
        """The sum over the stages of each rank, [partial, rank]."""
        return np.add.reduceat(of_stages[:, self._by_rank], self._begins, axis=1)

    def _schedule(self, ticks: Sequence[_Tick], number: int, name: str) -> Schedule:
        chosen = []
        for tick in reversed(ticks):
            chosen.append(tick.actions[number])
            number = tick.parents[number]
        kinds = (Kind.F, Kind.I if self._splits else Kind.B, Kind.W)
        rows: list[list[Action]] = [[] for _ in range(self._problem.num_ranks)]
        begun = np.zeros((self._problem.num_stages, 3), int)
        for actions in reversed(chosen):
            for rank, action in enumerate(actions.tolist()):
                if action >= 0:
                    stage, kind = divmod(action, 3)
                    rows[rank].append(Action(stage, kinds[kind], int(begun[stage, kind])))
                    begun[stage, kind] += 1
        return Schedule(name, tuple(map(tuple, rows)), self._problem.placement, strict=not self._splits)

    def _all_orders(self) -> np.ndarray:
        """Numbers above 0 and at most 1 for each order of kinds and stages, [order, stage, kind]."""
        stages = len(self._placement)
        depth = (np.arange(stages) + 1) / (stages + 1)
        orders = []
        for kinds, deep in itertools.product(_ORDERS, (True, False)):
            order = np.empty((stages, 3))
            for place, kind in enumerate(kinds):
                order[:, kind] = (2 - place + (depth if (kind == _F) == deep else 1 - depth)) / 3
            orders.append(order)
        return np.stack(orders)

    def _lengths_of_ticks(self) -> np.ndarray:
        with_hops = self._durations[:, _F] + self._activation_hops, self._durations[:, _I:] + self._gradient_hops.max()
        lengths = np.concatenate([self._durations.ravel(), *(each.ravel() for each in with_hops)])
        lengths = np.sort(lengths)
        different = lengths[np.append(True, np.diff(lengths) > 1e-6 * lengths[1:])]
        if len(different) > MOST_LENGTHS:
            different = np.quantile(different, np.linspace(0, 1, MOST_LENGTHS), method="nearest")
        return different * (1 + ROUNDING)


def _different(rows: np.ndarray) -> np.ndarray:
    """The number of the first of each different row of whole numbers, in order."""
    # Rows are compared by hashes of 63 bits. Should two different rows have the same one, the second is left out.
    factors = np.random.default_rng(0).integers(2**63, size=rows.shape[1], dtype=np.int64)
    hashes = (rows * factors).sum(axis=1)  # sums of arrays wrap around
    return np.sort(np.unique(hashes, return_index=True)[1])
