"""Which sessions have KV in which tier, and whose goes one tier down when others need the room.

The policy decides. `signal` offloads KV when its session says that it waits (`Phases`), and when others need the room.
`lru` offloads only then, longest idle first. `none` drops KV instead. Planning only: time comes from a clock argument.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from app.domain.values import KVPolicy, Phase, SessionId, Tier
from app.gpu.kv.ranking import ANY_TIME, MoveMeter, Victims, rank
from app.gpu.kv.tiers import KVTiers
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence, TurnState

WRITE_BEHIND_STRIPES = 8
"""Of blocks in one early copy: so few that a park hardly waits for it."""
DISK_REST_S = 10.0
"""How long no file is written after a write has failed: a full disk does not empty itself in a step."""
PREFETCH_MARGIN_S = 0.1
"""How long before its return a session's KV should be on the device, at least."""
STEPS_IN_MARGIN = 2
"""A move is ordered when a step is over, and counts when another is."""
STEP_DECAY = 0.95
"""How much of the longest step still counts after the next one: prompts come in bursts and delay everything."""


class Placement:
    """Every session with KV is in one list: `active` if it has a turn, else `resident` while it holds device blocks,
    and `away` while its KV is elsewhere. Those that have a file are also in another one.
    """

    def __init__(
        self,
        tiers: KVTiers,
        policy: KVPolicy,
        disk_blocks: int,
        clock: Callable[[], float],
        borrow: Callable[[int], int],
    ) -> None:
        """`borrow` gets at least so many device blocks from weights and returns how many; 0: weights have too few."""
        self.tiers, self.counts = tiers, tiers.counts
        self.policy = policy
        self.clock = clock
        self.meter = MoveMeter(tiers.block_bytes)
        self.resident: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        """Longest idle first."""
        self.away: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        """Longest away first."""
        self.active: dict[SessionId, TokenSequence] = {}
        self._with_file: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        """Oldest file first."""
        self.disk_blocks = disk_blocks
        self.promised: Collection[TokenSequence] = ()
        """Those whose files give way to none."""
        self.changed = False
        """Whether there may be room where there was none, or a prefetch may take longer, since `Phases` last looked."""
        self._borrow = borrow
        self._placed: dict[SessionId, TokenSequence] = {}
        self._moved: dict[SessionId, TokenSequence] = {}
        self._victims: dict[str | None, Victims] = {}
        """By the tenant that prefetches; None: for turns. Kept until `forget_order`."""
        self._held = Counter[str]()
        """Device blocks by tenant, as prefetches of this order leave them."""
        self._awaited: dict[tuple[int, ...], int] = {}
        """So many host blocks will be there only once a move ends: by what must not have changed for that to hold."""
        self._writable_at = -math.inf
        self._step_s = 0.0
        self._ordered_at: dict[int, float] = {}

    # The lists.

    def begin_turn(self, sequence: TokenSequence, turn: TurnState) -> None:
        """Note that the session has a turn: its KV is wanted on the device."""
        self._take_out(sequence)
        sequence.phase, sequence.resume_at, sequence.fast_path_until = Phase.COMPUTE, None, 0
        self.tiers.head_back(sequence)
        turn.begun_at = self.clock()
        self.note_placed(sequence)
        self.active[sequence.session] = sequence
        self.counts.late_restores += sequence.tier not in (Tier.DEVICE, None)

    def end_turn(self, sequence: TokenSequence) -> None:
        """Note that the session has no turn, or has just been opened."""
        self._take_out(sequence)
        self.refile(sequence)

    def refile(self, sequence: TokenSequence) -> None:
        """Put a session, unless it has a turn, in the list that fits the place of its KV."""
        self.note_placed(sequence)
        session, fits, other = sequence.session, self.away, self.resident
        if sequence.closed or session in self.active:
            return
        if sequence.blocks:
            fits, other = other, fits
        other.pop(session, None)
        if sequence.tier is None:
            fits.pop(session, None)
        elif session not in fits:
            fits[session] = sequence
            if sequence.blocks:
                self.forget_order()

    def cut(self, sequence: TokenSequence, length: int) -> None:
        """Forget the KV of a session without a turn from position `length` on, in every tier."""
        self.tiers.cut(sequence, length)
        self.refile(sequence)

    def drop(self, sequence: TokenSequence) -> None:
        """Lose the session's KV, as no tier has room for it."""
        self.counts.dropped += 1
        self._free(sequence)
        self.note_placed(sequence)

    def close(self, sequence: TokenSequence) -> None:
        """Free everything that the session holds in any tier."""
        sequence.closed = True
        self._take_out(sequence)
        self._free(sequence)

    def _free(self, sequence: TokenSequence) -> None:
        self.tiers.drop(sequence)
        self.away.pop(sequence.session, None)
        self._with_file.pop(sequence.session, None)

    def _take_out(self, sequence: TokenSequence) -> None:
        """Take the session out of every list; others may have the room that it gives up."""
        self.changed = True
        self.forget_order()
        for sessions in (self.active, self.resident, self.away):
            sessions.pop(sequence.session, None)

    def note_placed(self, sequence: TokenSequence) -> None:
        """Note that the session's KV has changed its place or size."""
        if not sequence.closed:
            self._placed[sequence.session] = self._moved[sequence.session] = sequence

    def take_placed(self) -> list[TokenSequence]:
        """Sessions whose KV has changed its place or size since the last call."""
        placed, self._placed = self._placed, {}
        return list(placed.values())

    def take_moved(self) -> list[TokenSequence]:
        """The same for `Phases`, since it last looked."""
        moved, self._moved = self._moved, {}
        return list(moved.values())

    # Moves.

    def take_orders(self) -> list[Move]:
        """The moves that have been decided on since the last call."""
        orders, now = self.tiers.take_orders(), self.clock()
        for move in orders:
            self._ordered_at[move.number] = now
            self.note_placed(self.tiers.in_flight[move.number][1])
        return orders

    def complete(self, report: Moved) -> Move:
        """Account for a move that has ended; `Phases.tick` then goes on with what it made possible."""
        move, sequence = self.tiers.complete(report)
        self.meter.add(move, report)
        ordered_at = self._ordered_at.pop(move.number)
        if move.early:
            self.counts.write_behind_bytes += len(move.source) * self.tiers.block_bytes
        if report.error is not None and move.kind in (MoveKind.TO_DISK, MoveKind.FROM_DISK):
            self.counts.disk_failures += 1
            if move.kind is MoveKind.TO_DISK:
                self._writable_at = self.clock() + DISK_REST_S
        if sequence.turn is not None and not sequence.turn.paused and move.kind in (MoveKind.IN, MoveKind.FROM_DISK):
            sequence.turn.restore_ms += (self.clock() - max(ordered_at, sequence.turn.begun_at)) * 1000
        self.refile(sequence)
        self.changed = True
        return move

    @property
    def loading(self) -> int:
        """Blocks that come from disk and will need room on the device."""
        return sum(each.disk_blocks for each in self.tiers.moving.values() if each.moving is Tier.TO_HOST)

    @property
    def host_is_emptying(self) -> bool:
        """Whether moves under way will free host blocks, or turn them into some that can be freed."""
        return bool(self.tiers.moving)

    def load(self, sequence: TokenSequence) -> None:
        """Begin to read the file of a session that has a turn. Its KV is lost if the host will have no room."""
        if not self.begin_load(sequence) and not self.host_is_emptying:
            self.drop(sequence)

    def begin_load(self, sequence: TokenSequence) -> bool:
        """Begin to read a session's file, once others have given way to it on the host. False: no room yet."""
        load = self.tiers.load
        return load(sequence) or (self.make_host_room(sequence.disk_blocks, sequence) and load(sequence))

    def free_host(self, sequence: TokenSequence) -> None:
        """Take the KV of a session without a turn out of host memory, unless it moves: to disk, or it is lost."""
        if sequence.busy or sequence.moving is not None or not sequence.host_blocks:
            return
        if sequence.blocks:
            self.tiers.cache.release_copies(sequence, 0)
        elif not self.save(sequence):
            self.drop(sequence)
        self.refile(sequence)

    def write_behind(self, running: Iterable[TokenSequence]) -> None:
        """While the link is idle, copy full blocks of one running session to the host: its next park is shorter."""
        if self.policy is not KVPolicy.SIGNAL or self.tiers.in_flight:
            return
        host = self.tiers.cache.host
        for sequence in (each for each in running if each.waits):
            stripe = host.stripe
            end = stripe * min(len(sequence.hashes), sequence.copied // stripe + WRITE_BEHIND_STRIPES)
            if sequence.copied < end and host.available >= 2 * WRITE_BEHIND_STRIPES * stripe:
                self.tiers.copy_out(sequence, end, early=True)
                return

    def save(self, sequence: TokenSequence, keep: Collection[TokenSequence] = ()) -> bool:
        """Move a session from host to disk. False if there is no room for it with the files of `keep` and the
        `promised` ones, or no file is written.

        A file holds whole passes only: the pass of a paused turn is recomputed up to its boundary.
        """
        self.tiers.forget_half_pass(sequence)
        if not sequence.host_blocks:
            self.away.pop(sequence.session, None)
            return True
        clean = sequence.disk_tokens >= sequence.computed
        if not clean and self.clock() < self._writable_at:
            return False
        if not clean and not self.make_disk_room(sequence.copy_count, sequence, keep):
            return False
        self.tiers.save(sequence)
        self.note_placed(sequence)
        self._with_file[sequence.session] = sequence
        self._with_file.move_to_end(sequence.session)
        return True

    def adopt(self, sequence: TokenSequence, computed: int, file_blocks: int, behind: int) -> None:
        """Take a file as the session's own, for the first `computed` tokens of its history. The file has `file_blocks`
        blocks: not those that lie `behind` the window.

        It is deleted if it does not fit, if `computed` is 0, or if it lacks blocks that the next token sees.
        """
        is_of_use = computed and self.tiers.cache.host.first_seen(computed) >= behind
        if is_of_use and self.make_disk_room(file_blocks, sequence, ()):
            self.tiers.set_file_size(sequence, file_blocks, behind)
            sequence.disk_tokens = sequence.computed = computed
            self._with_file[sequence.session] = sequence
        else:
            self.counts.dropped += computed > 0
            self.tiers.delete_file(sequence)

    # Who gives way on the device.

    @property
    def margin_s(self) -> float:
        """How long before its return a session's KV should be on the device, as long as steps take lately."""
        return PREFETCH_MARGIN_S + STEPS_IN_MARGIN * self._step_s

    def note_step(self, seconds: float) -> None:
        """The engine has been busy with a step for so long, and has ordered no move: prefetches begin earlier."""
        before_s = self._step_s
        self._step_s = max(seconds, STEP_DECAY * self._step_s)
        self.changed |= self._step_s > before_s

    def forget_order(self) -> None:
        """Sessions without a turn may give way in another order now: time has passed, or one has said something."""
        self._victims.clear()

    def _may_give_way(self, prefetching: str | None) -> Victims:
        """Those that a tenant's prefetch may ask; None: those that a turn may ask."""
        found = self._victims.get(prefetching)
        if found is None:
            asked = [each for each in self.resident.values() if each.moving is None and not each.guaranteed]
            if prefetching is not None:
                self._held = self._held_by_tenant()
                asked = [each for each in asked if self._may_ask(prefetching, each.tenant)]
            listens, now, margin_s = self.policy is KVPolicy.SIGNAL, self.clock(), self.margin_s
            found = Victims((rank(each, now, margin_s) if listens else ANY_TIME, each) for each in asked)
            self._victims[prefetching] = found
        return found

    def _may_ask(self, tenant: str, other: str) -> bool:
        """Whether prefetches of a tenant may take room from the other one, or itself, after those before them."""
        return tenant == other or self._held[other] > self._held[tenant]

    def _held_by_tenant(self) -> Counter[str]:
        """Device blocks, with those that restores under way will fill."""
        held = Counter[str]()
        for sequence in (*self.resident.values(), *self.active.values()):
            held[sequence.tenant] += sequence.held_count
        for move, sequence in self.tiers.in_flight.values():
            held[sequence.tenant] += len(move.blocks) if sequence.incoming is move else 0
        return held

    def make_room(
        self,
        needed: int,
        for_sequence: TokenSequence,
        *,
        prefetch: bool = False,
        or_some: bool = False,
        may_lose: bool = True,
    ) -> bool:
        """Evict sessions without a turn until `needed` device blocks are available; returns whether they are now.

        - Evicted blocks may still be on their way out: ask again when a move has ended.
        - A `prefetch` evicts no session that returns before its own, and none of another tenant that has no more on
          the device than its own. It borrows nothing from weights.
        - If there cannot be that many blocks, no session is evicted, except with `or_some`.
        - Without `may_lose`, no session is evicted whose KV no lower tier has room for.
        - `for_sequence` itself loses nothing in any tier.
        """
        pool, tenant = self.tiers.cache.pool, for_sequence.tenant
        if pool.available >= needed:
            return True
        victims = self._may_give_way(tenant if prefetch else None)
        back_at = for_sequence.return_time if prefetch else None
        most = pool.available + pool.leaving + victims.blocks(back_at)
        if most < needed and (prefetch or not self._grow(needed - most)) and not or_some:
            return False
        for victim in victims.in_order(back_at):
            if pool.available + pool.leaving >= needed:
                break
            if prefetch and not self._may_ask(tenant, victim.tenant):
                continue  # others of it have given way in this look
            blocks = victim.held_count
            if self.evict(victim, for_sequence, may_lose=may_lose):
                if prefetch:
                    self._held[victim.tenant] -= blocks
            elif not (may_lose or self.host_is_emptying):
                break  # there would hardly be room for the next
        if prefetch:
            self._held[tenant] += needed
        return pool.available >= needed

    def evict(self, sequence: TokenSequence, for_sequence: TokenSequence, *, may_lose: bool = True) -> bool:
        """Take a session's KV off the device for another, or begin to. The KV is lost if no lower tier has room, and if
        it `may_lose` it.

        False while the host still makes room for it, and if it stays.
        """
        if self.policy is KVPolicy.NONE:
            self.drop(sequence)
        elif sequence.tier is Tier.DEVICE and not self.tiers.park(sequence):
            room = self.make_host_room(sequence.uncopied, sequence, for_sequence)
            if not (room and self.tiers.park(sequence)) and may_lose and not self.host_is_emptying:
                self.drop(sequence)
        self.refile(sequence)
        return sequence.tier is not Tier.DEVICE

    def evict_together(self, sequences: Sequence[TokenSequence], for_sequence: TokenSequence) -> None:
        """`evict` all of them, with room on the host for all at once: else each would wait for the one before."""
        if self.policy is not KVPolicy.NONE:
            needed = sum(each.uncopied for each in sequences)
            self._awaited.clear()  # what is under way may be for fewer of them
            self.make_host_room(needed, *sequences, for_sequence)
        for sequence in sequences:
            self.evict(sequence, for_sequence)

    def _grow(self, missing: int) -> bool:
        borrowed = self._borrow(missing)
        self.tiers.cache.pool.grow(borrowed)
        return borrowed > 0

    # Who gives way in the lower tiers.

    def make_host_room(self, needed: int, *keep: TokenSequence) -> bool:
        """Whether `needed` host blocks are available now. If not, this frees some, or begins to: ask again later.

        First go the copies of sessions that are on the device too. Then sessions move to disk: those of the tenant that
        holds the most host blocks first, and of a tenant the longest away first. Those whose turn waits for room on the
        device go last, and only for a session with a turn: with the file of a session without one, the turn would wait
        for both. Sessions in `keep` lose nothing. If all that would not be enough, no session loses anything.
        """
        host, has_turn = self.tiers.cache.host, any(each.busy for each in keep)
        if host.available >= needed:
            return True
        # Of all the sessions that could give way to one, each would go through all those that hold host blocks.
        if needed >= self._awaited.get(self._moment(has_turn), math.inf) and self.host_is_emptying:
            return False
        at_rest = (each for each in (*self.active.values(), *self.resident.values()) if each.moving is None)
        copied = [each for each in at_rest if each.host_blocks and each.blocks and each not in keep]
        away = (*self.away.values(), *(reversed(self.active.values()) if has_turn else ()))
        savable, held = list[TokenSequence](), Counter[str]()
        if self.disk_blocks:
            savable = [each for each in away if each.tier is Tier.HOST and not each.guaranteed and each not in keep]
            for sequence in away:
                held[sequence.tenant] += sequence.copy_count
            savable.sort(key=lambda each: -held[each.tenant])
        most = host.available + self.tiers.saving + sum(each.copy_count for each in chain(copied, savable))
        if most >= needed:
            for sequence in copied:
                if host.available >= needed:
                    break
                self.tiers.cache.release_copies(sequence, 0)
                self.note_placed(sequence)
            for sequence in savable:
                if host.available + self.tiers.saving >= needed:
                    break
                self.save(sequence, keep)
        if host.available < needed and self.host_is_emptying:
            self._awaited = {self._moment(has_turn): needed}
        return host.available >= needed

    def _moment(self, has_turn: bool) -> tuple[int, ...]:
        """What room on the host depends on, as far as it changes while moves are under way."""
        tiers, host = self.tiers, self.tiers.cache.host
        return tiers.last, len(tiers.in_flight), tiers.counts.turned_round, host.available, int(has_turn)

    def make_disk_room(self, needed: int, for_sequence: TokenSequence, keep: Collection[TokenSequence]) -> bool:
        """Whether a file of `needed` blocks for the sequence fits now, in place of the one it has."""
        if needed > self.disk_blocks:
            return False
        return self._delete_files(self.disk_blocks - needed + for_sequence.disk_blocks, {for_sequence, *keep})

    def give_way(self, blocks: int) -> None:
        """Delete files of `blocks` blocks, or all that may go: the disk has no room for them any more."""
        self._delete_files(self.tiers.file_blocks - blocks, ())

    def _delete_files(self, most: int, keep: Collection[TokenSequence]) -> bool:
        """Delete files until all have `most` blocks at most: first those whose KV is elsewhere too, then the oldest."""
        if self.tiers.file_blocks > most:
            asked = [each for each in self._with_file.values() if each not in keep and each not in self.promised]
            spare = [each for each in asked if each.tier is not Tier.DISK and each.moving is not Tier.TO_DISK]
            only = [each for each in asked if each.tier is Tier.DISK and not each.guaranteed]
            for sequence in chain(spare, only):
                if self.tiers.file_blocks <= most:
                    break
                if sequence.tier is Tier.DISK:
                    self.drop(sequence)
                else:
                    self.tiers.forget_file(sequence)
                    self.note_placed(sequence)
                    del self._with_file[sequence.session]
        return self.tiers.file_blocks <= most
