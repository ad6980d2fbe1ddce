"""Runs a lowered table by hand, tick by tick and device by device, with names in place of arrays.

Written from what `TickPhase` and `Tick` say, without a look at how the table was made. Memory holds names such as
`("input", stage, microbatch)`; whoever reads a slot says what must lie there. What an idle device sends or scores is
None, as is memory that was never written, so that whatever uses it fails.
"""

import collections

from fiddlex.schedules.schedule import Action, Kind
from fiddlex.schedules.table import NONE, Tick, TickPhase


class Memory:
    """The slots of one array on one device, and when each name was written and last read."""

    def __init__(self, num_slots):
        self.slots = [None] * num_slots
        self.written, self.read = {}, {}

    def put(self, slot, name, moment):
        assert 0 <= slot < len(self.slots), f"{name} put in slot {slot} of {len(self.slots)}"
        self.slots[slot] = name
        if name is not None:
            assert name not in self.written, f"{name} written twice"
            self.written[name] = moment

    def take(self, slot, name, moment):
        assert 0 <= slot < len(self.slots), f"{name} read from slot {slot} of {len(self.slots)}"
        assert self.slots[slot] == name, f"{self.slots[slot]} in the slot from which {name} is read"
        self.read[name] = moment
        return name

    def most_alive(self):
        """The most names that are needed at once; names that are never read (the trash) are not needed."""
        lives = [(self.written[name], end) for name, end in self.read.items()]
        return max((sum(start <= moment <= end for start, end in lives) for moment, _ in lives), default=0)


class Interpreter:
    """All devices of a pipe, and what they did.

    Attributes:
      placed: the tick of each action, as the table has it.
      orders: for each rank the order in which its actions ran.
      forward_inbox, backward_inbox, stash, host_stash, weight_stash: the `Memory` of each device.
    """

    def __init__(self, lowered):
        self.lowered = lowered
        ranks = range(lowered.schedule.num_ranks)
        self.forward_inbox = [Memory(lowered.forward_inbox_slots + 1) for _ in ranks]
        self.backward_inbox = [Memory(lowered.backward_inbox_slots + 1) for _ in ranks]
        self.stash = [Memory(lowered.stash_slots) for _ in ranks]
        self.weight_stash = [Memory(lowered.weight_stash_slots) for _ in ranks]
        self.host_stash = [Memory(lowered.host_stash_slots) for _ in ranks]
        self.placed, self.orders = {}, [[] for _ in ranks]
        self.counts = collections.Counter()  # of gradients and of what all devices do together
        self.trains = any(action.kind is not Kind.F for row in lowered.schedule.actions for action in row)
        self._outgoing = [None for _ in ranks]
        self._fetched = set()

    def run(self):
        for tick in range(self.lowered.num_ticks):
            rows = [[int(cell) for cell in row] for row in self.lowered.table[tick]]
            named = [Tick(*row[: len(Tick._fields)]) for row in rows]
            hops = [row[len(Tick._fields) :] for row in rows]
            assert len({(row.embed, row.head, row.embed_backward) for row in named}) == 1
            self._tick(tick, named, hops)
        return self

    def _tick(self, tick, rows, hops):
        devices = range(len(rows))
        split = len(self.lowered.forward_shifts)
        gradients = self._send(self._outgoing, self.lowered.backward_shifts)
        spilled = [self._spill(device, tick, rows[device]) for device in devices]
        outputs = [self._forward(device, tick, rows[device]) for device in devices]
        activations = self._send(outputs, self.lowered.forward_shifts)
        for device, name in enumerate(spilled):
            if name is not None:
                self.host_stash[device].put(rows[device].spill_host, name, (tick, TickPhase.BETWEEN))
        if self.lowered.scores_between:
            self._head(rows, outputs, (tick, TickPhase.BETWEEN))
        for device in devices if self.trains else ():
            self._arrive(
                self.backward_inbox[device], hops[device][split:], gradients[device], (tick, TickPhase.BETWEEN)
            )
        fetched = [self._fetch(device, tick, rows[device]) for device in devices]
        self._outgoing = [self._backward(device, tick, rows[device]) for device in devices]
        for device in devices:
            self._weight(device, tick, rows[device])
        if not self.lowered.scores_between:
            self._head(rows, outputs, (tick, TickPhase.END))
        self._embed_backward(rows)
        for device, name in enumerate(fetched):
            if name is not None:
                self.stash[device].put(rows[device].fetch_stash, name, (tick, TickPhase.END))
                self._fetched.add(name[1:])
        for device in devices:
            slots = hops[device][:split]
            self._arrive(self.forward_inbox[device], slots, activations[device], (tick, TickPhase.END))

    def _send(self, sent, shifts):
        """For each device what arrives by each shift."""
        return [[sent[(device - shift) % len(sent)] for shift in shifts] for device in range(len(sent))]

    def _arrive(self, inbox, slots, arrivals, moment):
        trash = len(inbox.slots) - 1
        for slot, name in zip(slots, arrivals, strict=True):
            # A neighbour may send what is meant for another device; that must go to the trash.
            assert name is not None or slot == trash, f"nothing arrives in slot {slot}, which is not the trash"
            inbox.put(slot, None if slot == trash else name, moment)

    def _forward(self, device, tick, row):
        if row.forward_chunk == NONE:
            idle = (row.forward_microbatch, row.forward_inbox, row.forward_stash, row.forward_version, row.is_last)
            assert idle == (NONE, NONE, NONE, NONE, 0)
            return None
        action = self._ran(device, tick, Kind.F, row.forward_chunk, row.forward_microbatch)
        needed, moment = ("activation", action.stage, action.microbatch), (tick, TickPhase.FORWARD)
        if row.forward_inbox == NONE:
            assert needed == ("activation", 0, row.embed)
            self.counts["embed", row.embed] += 1
        else:
            self.forward_inbox[device].take(row.forward_inbox, needed, moment)
        if self.trains:
            self.stash[device].put(row.forward_stash, ("residuals", action.stage, action.microbatch), moment)
        assert row.forward_version == 0
        return ("activation", action.stage + 1, action.microbatch)

    def _head(self, rows, outputs, moment):
        """Scores what leaves the last stage; all devices get the gradient."""
        leaving = [output for row, output in zip(rows, outputs, strict=True) if row.is_last]
        num_stages, scored = self.lowered.schedule.num_stages, None
        if rows[0].head == NONE:
            assert leaving == []
        else:
            assert leaving == [("activation", num_stages, rows[0].head)]
            self.counts["head", rows[0].head] += 1
            scored = ("gradient", num_stages, rows[0].head)
        for row, inbox in zip(rows, self.backward_inbox if self.trains else [], strict=self.trains):
            self._arrive(inbox, [row.head_inbox], [scored], moment)

    def _backward(self, device, tick, row):
        if row.backward_chunk == NONE:
            idle = (row.backward_microbatch, row.backward_inbox, row.backward_stash, row.backward_version, row.is_first)
            assert idle == (NONE, NONE, NONE, NONE, 0)
            assert row.backward_left == NONE
            return None
        split = row.backward_left != NONE
        action = self._ran(device, tick, Kind.I if split else Kind.B, row.backward_chunk, row.backward_microbatch)
        stage, microbatch, moment = action.stage, action.microbatch, (tick, TickPhase.BACKWARD)
        self.backward_inbox[device].take(row.backward_inbox, ("gradient", stage + 1, microbatch), moment)
        self.stash[device].take(row.backward_stash, self._residuals(stage, microbatch), moment)
        if split:
            self.weight_stash[device].put(row.backward_left, ("left", stage, microbatch), moment)
        else:
            self.counts["weight gradient", stage, microbatch] += 1
        assert row.backward_version == 0
        return ("gradient", stage, microbatch)

    def _embed_backward(self, rows):
        leaving = [sent for row, sent in zip(rows, self._outgoing, strict=True) if row.is_first]
        microbatch = rows[0].embed_backward
        if microbatch == NONE:
            assert leaving == []
        else:
            assert leaving == [("gradient", 0, microbatch)]
            self.counts["embed backward", microbatch] += 1

    def _weight(self, device, tick, row):
        if row.weight_chunk == NONE:
            idle = (row.weight_microbatch, row.weight_stash, row.weight_left, row.weight_version)
            assert idle == (NONE,) * 4
            return
        action = self._ran(device, tick, Kind.W, row.weight_chunk, row.weight_microbatch)
        stage, microbatch, moment = action.stage, action.microbatch, (tick, TickPhase.WEIGHT)
        self.stash[device].take(row.weight_stash, self._residuals(stage, microbatch), moment)
        self.weight_stash[device].take(row.weight_left, ("left", stage, microbatch), moment)
        self.counts["weight gradient", stage, microbatch] += 1
        assert row.weight_version == 0

    def _spill(self, device, tick, row):
        """The name of what is copied to the host; its copy has another name."""
        if row.spill_chunk == NONE:
            assert (row.spill_microbatch, row.spill_stash, row.spill_host) == (NONE,) * 3
            return None
        named = self.lowered.schedule.stages_of(device)[row.spill_chunk], row.spill_microbatch
        self.stash[device].take(row.spill_stash, ("residuals", *named), (tick, TickPhase.EMBED))
        return ("spilled", *named)

    def _fetch(self, device, tick, row):
        if row.fetch_chunk == NONE:
            assert (row.fetch_microbatch, row.fetch_stash, row.fetch_host) == (NONE,) * 3
            return None
        named = self.lowered.schedule.stages_of(device)[row.fetch_chunk], row.fetch_microbatch
        self.host_stash[device].take(row.fetch_host, ("spilled", *named), (tick, TickPhase.BACKWARD))
        return ("fetched", *named)

    def _residuals(self, stage, microbatch):
        """The name of what a forward saved, as it is in the stash now."""
        return ("fetched" if (stage, microbatch) in self._fetched else "residuals", stage, microbatch)

    def _ran(self, device, tick, kind, chunk, microbatch):
        action = Action(self.lowered.schedule.stages_of(device)[chunk], kind, microbatch)
        assert action not in self.placed, f"{action} runs twice"
        self.placed[action] = tick
        self.orders[device].append(action)
        return action
