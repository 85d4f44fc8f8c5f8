"""Operations on a sequence's blocks: find a prefix, reserve room to write, publish full blocks, fork, cut, drop.

None is allowed while the sequence's KV moves: `KVTiers` takes care of that.

Of layers with a window (`BlockPool.groups`) a sequence gives up the blocks that lie behind it, on the device and on the
host. They stay published until others need the room. A sequence that is cut to where its window's blocks are no longer
held goes on from the longest prefix that is still found, and recomputes the rest.

Where layers fold, a sequence's last blocks have their state (`BlockPool.state_blocks`). It is true of the computed
tokens and of no fewer, so a sequence that is cut goes back to an earlier state. Some are kept for that: those at the
ends of turns and of their prompts; in a prompt one for every `state_every` tokens; one at each of the turn's
`prefix_ends`, which others may share; and one where a prompt diverges from what another has computed. The closer
to a prompt's end, the closer they lie: the engine cannot know where the next prompt will diverge, but mostly few tokens
follow a shared prefix. A kept state is a prefix like any other. Its blocks are published, so what writes to them next
gets others, and they stay until others need the room.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import takewhile

from app.domain.values import SessionId
from app.gpu.state.blocks import BlockHash, BlockId, BlockPool, chain_hash
from app.gpu.state.checkpoints import Checkpoint
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.paths import NO_EDITS, expected_edits
from app.gpu.state.sequence import TokenSequence

WORTH_A_STATE = 4
"""A state takes as much room as the KV of `state_every` tokens. A prefix's end keeps one if that saves one of so many
parts of these tokens.
"""


class KVCache:
    """Keeps each sequence's blocks, their host copies, `hashes` and `computed` in step with the two block pools."""

    def __init__(
        self, pool: BlockPool, host: BlockPool, *, hash_tokens: int | None = None, state_every: int = 0
    ) -> None:
        """There is a hash for so many tokens; None: for each block. On the way through a prompt a state is kept for so
        many tokens; 0: none is.
        """
        self.pool = pool
        self.host = host
        self.hash_tokens = hash_tokens or pool.block_size
        self.state_every = state_every

    def match_prefix(self, sequence: TokenSequence) -> None:
        """Give a sequence that holds no blocks the longest published prefix of its history.

        At least one token is always left to compute: the step needs its logits. Every token that a breakpoint waits
        for is left too. The prefix has been computed with the edits that the sequence would get.
        """
        blocks, hashes = self.find_prefix(sequence, self.pool)
        if self.state_every:
            self._note_branch(sequence, len(hashes) * self.hash_tokens)
        self.pool.share(blocks)
        self._begin_at(sequence, hashes)
        self.hold(sequence, blocks, self.pool.first_seen(sequence.computed))

    def _note_branch(self, sequence: TokenSequence, found: int) -> None:
        """Note where the sequence's prompt leaves what others have computed, unless it saves little to keep a state
        there: `found` tokens have one. Who comes next with the same prefix finds it (Marconi; Pan et al., 2025).
        """
        turn = sequence.active_turn
        edits, limit = expected_edits(sequence)
        known = self._chain(sequence, min(len(sequence.tokens) - 1, limit) // self.hash_tokens, edits)
        end = sum(1 for _ in takewhile(self.pool.has, known))
        turn.prefix_ends = self._worth_a_state(found, [*turn.prefix_ends, end * self.hash_tokens])
        turn.near_ends = self._near_end(sequence, found)

    def note_prefix_ends(self, sequence: TokenSequence, ends: Iterable[int]) -> None:
        """Note where the prompt of a turn that begins has prefixes that others may share."""
        if self.state_every:
            turn = sequence.active_turn
            turn.prefix_ends = self._worth_a_state(0, ends)
            turn.near_ends = self._near_end(sequence, sequence.computed) if sequence.computed else ()

    def _near_end(self, sequence: TokenSequence, computed: int) -> list[int]:
        """Ends of blocks: the last of the history, and others at twice the distance from it each time. Who shares all
        but `n` tokens of the history recomputes fewer than `n`, or less than a block. There is one for each
        `state_every` tokens to compute, and no more: as many as are kept on the way, and each costs a step. They take
        no more room than the KV of these tokens, if the model has any.
        """
        size, length = self.hash_tokens, len(sequence.tokens)
        last, most = length // size * size, (length - computed) // self.state_every
        ends = [last, *(last - (size << power) for power in range(most - 1))][:most]
        return [end for end in ends if computed < end < length]

    def _worth_a_state(self, found: int, ends: Iterable[int]) -> list[int]:
        """The `ends`, cut to whole blocks, that are far enough after the one before. The first is far enough after the
        `found` tokens, which already have a state.
        """
        worth = list[int]()
        for end in sorted(end // self.hash_tokens * self.hash_tokens for end in ends):
            if end - found >= self.state_every // WORTH_A_STATE:
                worth.append(found := end)
        return worth

    def _begin_at(self, sequence: TokenSequence, hashes: list[BlockHash]) -> None:
        """The sequence has got the KV, and the state, of a prefix with these hashes."""
        sequence.computed = len(hashes) * self.hash_tokens
        sequence.hashes = hashes[: sequence.computed // self.pool.block_size]
        sequence.marks = [sequence.computed] if self.pool.state_blocks and hashes else []

    def match_host_prefix(self, sequence: TokenSequence) -> None:
        """Give a sequence without KV the longest prefix of its history that the host has, if the device has less of it:
        to copy it costs less than to compute it.
        """
        blocks, hashes = self.find_prefix(sequence, self.host)
        if hashes and len(hashes) > len(self.find_prefix(sequence, self.pool)[1]):
            self._begin_at(sequence, hashes)
            self.hold_copies(sequence, blocks, self.host.first_seen(sequence.computed))
            self.accept_prefix(sequence)

    def finds_longer_prefix(self, sequence: TokenSequence) -> bool:
        """Whether one of the pools has a prefix of the history that is longer than what the sequence has, by a block or
        more.

        A turn that continues the last one costs one hash and one lookup, which finds nothing.
        """
        size = self.pool.block_size
        index, (edits, limit) = sequence.computed // size, expected_edits(sequence)
        if (index + 1) * size > min(len(sequence.tokens) - 1, limit) or len(sequence.hashes) < index:
            return False
        if self.pool.groups.full:
            following = self._hash(sequence, index, sequence.hashes[index - 1] if index else sequence.namespace, edits)
            first_of_it = self.pool.parts_of([following])[0]
            if self.pool.find(first_of_it) is None and self.host.find(first_of_it) is None:
                return False
        longest = max(len(self.find_prefix(sequence, pool)[1]) for pool in (self.pool, self.host))
        return (longest - 1) * size >= sequence.computed

    def find_prefix(self, sequence: TokenSequence, pool: BlockPool) -> tuple[list[BlockId], list[BlockHash]]:
        """The longest prefix of the history that `pool` has all blocks of that the next token sees: these, and the
        hashes of the prefix. Of a window the blocks of its end are seen. A state is at its end, where layers fold.
        """
        edits, limit = expected_edits(sequence)
        if pool.state_blocks:
            return self._find_state_prefix(sequence, pool, edits, limit)
        of_history = self._chain(sequence, min(len(sequence.tokens) - 1, limit) // pool.block_size, edits)
        if not pool.groups.windowed:
            hashes = list(takewhile(pool.has, of_history))
            return [block for block in pool.find_all(hashes) if block is not None], hashes
        hashes, stripes = list[BlockHash](), list[list[BlockId | None]]()
        full, size = pool.groups.full, pool.stripe
        together = first = end = 0
        for block_hash in of_history:
            stripe = [pool.find(block_hash)] if size == 1 else pool.find_all(pool.parts_of([block_hash]))
            if full and None in stripe[:full]:
                break
            hashes.append(block_hash)
            stripes.append(stripe)
            if None in stripe:
                together = 0
                continue
            together += 1
            seen = pool.first_seen(len(hashes) * pool.block_size) // size
            if together >= len(hashes) - seen:
                first, end = seen, len(hashes)
        seen_ones = [stripe[:full] for stripe in stripes[:first]] + stripes[first:end]
        return [block for stripe in seen_ones for block in stripe if block is not None], hashes[:end]

    def _find_state_prefix(
        self, sequence: TokenSequence, pool: BlockPool, edits: InterventionLog, limit: int
    ) -> tuple[list[BlockId], list[BlockHash]]:
        """The same of a model that folds."""
        keeps_tokens = pool.extra_blocks == pool.state_blocks
        found, hashes, ends = list[BlockId](), list[BlockHash](), list[int]()
        for block_hash in self._chain(sequence, min(len(sequence.tokens) - 1, limit) // self.hash_tokens, edits):
            block = pool.find(block_hash) if keeps_tokens else None
            if block is None and keeps_tokens:
                break
            hashes.append(block_hash)
            if block is not None:
                found.append(block)
            if pool.find(_part_of(block_hash, 0)) is not None:
                ends.append(len(hashes))
        for end in reversed(ends):
            states = _find_state(pool, hashes[end - 1])
            if states:
                return [*found[:end], *states], hashes[:end]
        return [], []

    def to_kept_end(self, sequence: TokenSequence, length: int) -> int:
        """A little less than `length`, if the next so many tokens end where no state is kept and others follow, or pass
        a prefix's end.
        """
        turn, computed = sequence.active_turn, sequence.computed
        ahead = [end for end in (*turn.prefix_ends, *turn.near_ends) if computed < end < computed + length]
        if ahead:
            return min(ahead) - computed
        end = (sequence.computed + length) // self.hash_tokens * self.hash_tokens
        return length if sequence.pending <= length or end <= sequence.computed else end - sequence.computed

    def _is_worth_keeping(self, sequence: TokenSequence) -> bool:
        """Whether the sequence may come back to the state that it has before its next tokens: that of a turn's
        beginning, of its prompt's end, of a pass that may run again, and one for every `state_every` tokens and where
        prefixes end, where others find it.
        """
        turn, computed = sequence.turn, sequence.computed
        if turn is not None:
            ends = turn.cached_tokens, turn.prompt_tokens, *turn.prefix_ends, *turn.near_ends
            if computed in ends:
                return True
        if any(each.may_run_again for each in sequence.breakpoints.values()):
            return True
        last = sequence.marks[-1] if sequence.marks else 0
        return computed % self.hash_tokens == 0 and computed - last >= self.state_every

    def keep_state(self, sequence: TokenSequence) -> None:
        """Offer the state that the sequence has now, until others need the room."""
        count, computed = self.pool.state_blocks, sequence.computed
        if not (count and computed and sequence.blocks) or sequence.marks[-1:] == [computed]:
            return
        identity = self._identity(sequence, computed)
        self.pool.publish(sequence.blocks[-count:], [_part_of(identity, part) for part in range(count)])
        sequence.marks.append(computed)

    def keep_state_copy(self, sequence: TokenSequence) -> None:
        """Offer the host's copy of the state, if it is whole and the state is kept."""
        count, copies, computed = self.host.state_blocks, sequence.host_blocks, sequence.computed
        if count and sequence.marks[-1:] == [computed] and len(copies) == self.host.blocks_for(computed):
            identity = self._identity(sequence, computed)
            self.host.publish(copies[-count:], [_part_of(identity, part) for part in range(count)])

    def _identity(self, sequence: TokenSequence, position: int) -> BlockHash:
        """What the state at `position` has been computed from."""
        edits, index = sequence.interventions, position // self.hash_tokens
        known = sequence.hashes
        if index > len(known):  # blocks of a model that keeps no tokens have no hashes
            known = list(self._chain(sequence, index, edits))
        parent = known[index - 1] if index else sequence.namespace
        if position % self.hash_tokens == 0:
            return parent
        first = index * self.hash_tokens
        return chain_hash(parent, sequence.tokens[first:position], edits.fingerprint(first, position) if edits else b"")

    def _go_back(self, sequence: TokenSequence, length: int) -> int:
        """Put the latest kept state of the first `length` tokens, as far as its tier still has one, in place of the
        state of a sequence that is cut. Returns how many tokens that state has folded; 0: no state is left.
        """
        on_device = bool(sequence.blocks)
        pool, blocks = (self.pool, sequence.blocks) if on_device else (self.host, sequence.host_blocks)
        while sequence.marks:
            position = sequence.marks[-1]
            is_held = bool(blocks) and position <= length
            states = _find_state(pool, self._identity(sequence, position)) if is_held else []
            if states:
                pool.share(states)
                keep = pool.blocks_for(position) - len(states)
                pool.release(blocks[keep:])
                blocks[keep:] = states
                if on_device:
                    self.release_copies(sequence, position // self.pool.block_size)
                sequence.fast_path_until = 0
                return position
            sequence.marks.pop()
        return 0

    def prompt_hashes(self, sequence: TokenSequence) -> list[BlockHash]:
        """Hashes of the full blocks that come before the last token of an unwatched sequence."""
        count = (len(sequence.tokens) - 1) // self.pool.block_size
        return list(self._chain(sequence, count, NO_EDITS))

    def extend(
        self, sequence: TokenSequence, blocks: Sequence[BlockId], computed: int, first: int, behind: int
    ) -> None:
        """Put host blocks, those from index `first` on that are held with so many `behind` the window, in place of what
        the sequence has from there on, if that is less and the host has all others that are seen. The KV of `computed`
        tokens is on the host then.
        """
        seen = self.pool.first_seen(computed)
        is_whole = first <= (0 if self.pool.groups.full else seen)
        if sequence.moving is not None or sequence.computed >= computed or behind > max(first, seen):
            return
        if len(sequence.host_blocks) < first and not is_whole:
            return
        sequence.outgoing = sequence.incoming = None  # copies under way were of what there was before
        self.release_copies(sequence, 0 if is_whole else first)
        self.release_blocks(sequence, 0)
        sequence.computed = computed
        self.hash_blocks(sequence)
        if behind > first:
            self._slide_to(sequence, behind)
        elif is_whole:
            behind = first
        else:
            behind = sequence.behind
        self.hold_copies(sequence, blocks, behind)

    def accept_prefix(self, sequence: TokenSequence) -> None:
        """Go on from the prefix that was found, and record the edits that it was computed with."""
        if sequence.watched and sequence.computed > sequence.reached:
            edits, _ = expected_edits(sequence)
            for made in edits.within(sequence.reached, sequence.computed):
                sequence.interventions.add(made)
            sequence.reached = sequence.computed

    def missing(self, sequence: TokenSequence, length: int) -> int:
        """Blocks that `reserve` of the same arguments would take from the pool. Of more than a step computes: most that
        the sequence would take on the way there.
        """
        return sequence.growth(self.pool, sequence.computed + length) + len(self._shared_with_others(sequence))

    def is_ready(self, sequence: TokenSequence) -> bool:
        """Whether the next token can be written at once: `reserve` of it would change nothing."""
        index = self.pool.place_of(sequence.computed)
        return (
            index < len(sequence.blocks) - self.pool.extra_blocks
            and all(map(self.pool.is_private, sequence.blocks[index:]))
            and len(sequence.host_blocks) <= index
        )

    def reserve(self, sequence: TokenSequence, length: int) -> list[tuple[BlockId, BlockId]]:
        """Make room to write the next `length` tokens; the caller has checked that `missing` blocks are available.

        Returns block copies (source, target) to make before the step. A block that the next tokens are written to is
        copied if another sequence holds it too. It is also copied if it serves as a prefix and a block is free, so a
        session that returns to a history it had cut finds that prefix whole.
        """
        copies = []
        first = self.pool.place_of(sequence.computed)
        if self.state_every and self._is_worth_keeping(sequence):
            self.keep_state(sequence)
        needed = max(0, self.pool.blocks_for(sequence.computed + length) - len(sequence.blocks))
        self.release_copies(sequence, first)
        copied = self._shared_with_others(sequence)
        end = len(sequence.blocks) if self.pool.state_blocks else first + self.pool.stripe
        offered = [i for i in range(first, min(end, len(sequence.blocks))) if i not in copied]
        offered = [i for i in offered if self.pool.is_published(sequence.blocks[i])]
        if self.pool.available >= needed + len(copied) + len(offered):
            copied += offered
        else:
            for index in offered:
                self.pool.unpublish(sequence.blocks[index])
        for index in copied:
            source = sequence.blocks[index]
            [target] = self.pool.allocate(1)
            sequence.blocks[index] = target
            self.pool.release([source])
            copies.append((source, target))
        if needed:
            end = len(sequence.blocks) - self.pool.extra_blocks if sequence.blocks else 0
            sequence.blocks[end:end] = self.pool.allocate(needed)
        return copies

    def reserve_draft(self, sequence: TokenSequence, most: int) -> int:
        """Make room for drafted tokens behind the next one, which has it, as far as blocks are available, and for the
        state behind each, if layers fold. Returns how many tokens have it, at most `most`. `trim` gives it up again.
        """
        pool, count, computed = self.pool, most, sequence.computed + 1
        while count and sequence.growth(pool, computed + count) + count * pool.state_blocks > pool.available:
            count -= 1
        needed = max(0, pool.blocks_for(computed + count) - len(sequence.blocks))
        end = len(sequence.blocks) - pool.state_blocks
        sequence.blocks[end:end] = pool.allocate(needed + count * pool.state_blocks)
        return count

    def take_drafted(self, sequence: TokenSequence, number: int) -> None:
        """Account for the so-many-th token of a draft, from 1 on, after those before it: it was chosen."""
        self.commit(sequence, len(sequence.tokens))
        if count := self.pool.state_blocks:
            blocks, end = sequence.blocks, len(sequence.blocks)
            own, behind = slice(end - count, end), slice(end - (number + 1) * count, end - number * count)
            blocks[own], blocks[behind] = blocks[behind], blocks[own]
            if self.state_every and self._is_worth_keeping(sequence):
                self.keep_state(sequence)

    def extend_plain(self, sequence: TokenSequence) -> bool:
        """Go on with the next stripe of a turn that has decoded plainly and filled its last one. False: it has to be
        looked at, or too few blocks are available.
        """
        if not sequence.fast_path_until:
            return False
        end, count = len(sequence.blocks) - self.pool.extra_blocks, self.pool.stripe
        if sequence.fast_path_until * count == end * self.pool.block_size:
            if self.pool.available < count:
                return False
            sequence.blocks[end:end] = self.pool.allocate(count)
        sequence.fast_path_until += self.pool.block_size
        return True

    def commit(self, sequence: TokenSequence, computed: int) -> None:
        """Account for tokens that have run all layers, and publish the blocks that they filled."""
        sequence.computed = computed
        if computed > sequence.reached:
            sequence.reached = computed
        first = len(sequence.hashes)
        if computed < (first + 1) * self.pool.block_size:  # a decoded token seldom fills a block
            return
        self.hash_blocks(sequence)
        filled = sequence.blocks[first * self.pool.stripe :]
        self.pool.publish(filled, self.pool.parts_of(sequence.hashes[first:]))
        self.slide(sequence)

    def slide(self, sequence: TokenSequence) -> None:
        """Give up the blocks that lie behind the window of the computed tokens."""
        first = self.pool.first_kept(sequence.computed)
        if first > sequence.behind:
            self._slide_to(sequence, first)

    def _slide_to(self, sequence: TokenSequence, behind: int) -> None:
        for pool, blocks in ((self.pool, sequence.blocks), (self.host, sequence.host_blocks)):
            pool.release(pool.groups.leave(blocks, sequence.behind, behind))
        sequence.groups = self.pool.groups
        sequence.behind = behind if sequence.blocks or sequence.host_blocks else 0

    def hash_blocks(self, sequence: TokenSequence) -> None:
        """Bring `hashes` up to the full stripes of the computed tokens."""
        for index in range(len(sequence.hashes), sequence.computed // self.pool.block_size):
            parent = sequence.hashes[-1] if sequence.hashes else sequence.namespace
            sequence.hashes.append(self._hash(sequence, index, parent, sequence.interventions))

    def held_hashes(self, sequence: TokenSequence, first: int, end: int = sys.maxsize) -> list[BlockHash]:
        """The hashes of the full blocks `[first, end)` that the sequence holds; `first` begins a stripe that is."""
        count = self.pool.stripe
        if count == 1:
            return sequence.hashes[first:end]
        hashes = self.pool.parts_of(sequence.hashes[first // count : end // count])
        return self.pool.groups.held(hashes, sequence.behind - first)

    def next_copies(self, sequence: TokenSequence) -> list[BlockId]:
        """The host's blocks with the content of the first full stripe that has no copies; none, if it lacks one."""
        first = sequence.copied
        found = self.host.find_all(self.held_hashes(sequence, first, first + self.host.stripe))
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(found) else []

    def of_whole_passes(self, sequence: TokenSequence, blocks: list[BlockId]) -> list[BlockId]:
        """Of the sequence's device or host blocks, all of which are here, those without a paused pass."""
        keep, extra = self.pool.blocks_for(sequence.computed), self.pool.extra_blocks
        return [*blocks[: keep - extra], *blocks[len(blocks) - extra :]] if keep else []

    def publish_copies(self, sequence: TokenSequence) -> None:
        """Offer the full blocks that the host has of the sequence."""
        self.host.publish(sequence.copies, self.held_hashes(sequence, sequence.first_held))

    def trim(self, sequence: TokenSequence, tokens: int) -> None:
        """Give up blocks that were reserved for more than so many tokens, and will not be written to. Where layers
        fold, these lie before the state.
        """
        keep, own = self.pool.blocks_for(tokens), self.pool.state_blocks
        if not own or not keep:
            self.release_blocks(sequence, keep)
            return
        if keep < len(sequence.blocks) != len(sequence.host_blocks):  # copies end among those that go
            self.release_copies(sequence, keep - own)
        for pool, blocks in ((self.pool, sequence.blocks), (self.host, sequence.host_blocks)):
            surplus, end = len(blocks) - keep, len(blocks) - own
            if surplus > 0:
                pool.release(blocks[end - surplus : end])
                del blocks[end - surplus : end]
                sequence.fast_path_until = 0

    def run_again(self, sequence: TokenSequence) -> None:
        """Forget that tokens behind the computed ones have run: a state is of these too. It is the one before them
        again, or else an earlier one, and what follows it is recomputed.
        """
        if self.pool.state_blocks:
            self.uncompute(sequence, self._go_back(sequence, sequence.computed))

    def uncompute(self, sequence: TokenSequence, length: int) -> None:
        """Forget the KV of the tokens from position `length` on, in every tier; the history stays.

        Where blocks that the next token sees are no longer held, what is left in that tier is useless: it goes too.
        """
        if self.pool.state_blocks and length < sequence.computed:
            length = self._go_back(sequence, length)
            if sequence.disk_tokens > length:
                sequence.disk_tokens = 0  # the state in the file is of more tokens
        sequence.computed = min(sequence.computed, length)
        if sequence.checkpoint is not None:
            sequence.checkpoint.held = False
        sequence.disk_tokens = min(sequence.disk_tokens, length)
        if self.pool.first_seen(sequence.disk_tokens) < sequence.disk_behind:
            sequence.disk_tokens = 0
        keep = self.pool.blocks_for(sequence.computed)
        if self.pool.first_seen(sequence.computed) < sequence.behind:
            keep = 0
        if self.pool.state_blocks:
            self.trim(sequence, sequence.computed)
        self.release_blocks(sequence, keep)
        self.release_copies(sequence, keep)
        if not (sequence.blocks or sequence.host_blocks):
            sequence.computed = min(sequence.computed, sequence.disk_tokens)
        del sequence.hashes[sequence.computed // self.pool.block_size :]

    def return_above(self, sequence: TokenSequence, checkpoint: Checkpoint) -> bool:
        """Have the sequence go on from a checkpoint at tokens that it has computed already, as if their pass had paused
        there. False if not all KV is there that the layers below have made, or it is of a state: then the layers below
        are computed too.
        """
        sequence.checkpoint, first = checkpoint, checkpoint.first
        checkpoint.held = (
            sequence.computed >= checkpoint.end
            and self.pool.first_seen(first) >= sequence.behind
            and not self.pool.state_blocks
        )
        if checkpoint.held:
            sequence.computed = first
            del sequence.hashes[first // self.pool.block_size :]
        return checkpoint.held

    def fork(self, sequence: TokenSequence, child: SessionId) -> TokenSequence:
        """A sequence with the same history that shares every block, the partly filled last one included."""
        self.pool.share(sequence.held)
        self.host.share(sequence.copies)
        sequence.fast_path_until = 0
        shared = bool(sequence.blocks or sequence.host_blocks)  # a file belongs to one session
        shared_checkpoint = None if sequence.checkpoint is None else copy(sequence.checkpoint)
        if shared_checkpoint is not None and not shared:
            shared_checkpoint.held = False
        return TokenSequence(
            child,
            sequence.namespace,
            tenant=sequence.tenant,
            adapter=sequence.adapter,
            tokens=list(sequence.tokens),
            blocks=list(sequence.blocks),
            hashes=list(sequence.hashes) if shared else [],
            host_blocks=list(sequence.host_blocks),
            behind=sequence.behind,
            groups=sequence.groups,
            marks=list(sequence.marks) if shared else [],
            computed=sequence.computed if shared else 0,
            reached=sequence.reached,
            breakpoints=dict(sequence.breakpoints),
            interventions=sequence.interventions.copy(),
            checkpoint=shared_checkpoint,
        )

    def freed(self, sequences: Sequence[TokenSequence]) -> int:
        """Blocks that would have no holder without the sequences and the moves that copy their blocks."""
        held = Counter(block for sequence in sequences for block in sequence.held)
        held.update(block for each in sequences if each.outgoing is not None for block in each.outgoing.source)
        return sum(self.pool.holders(block) <= count for block, count in held.items())

    def release_blocks(self, sequence: TokenSequence, keep: int) -> None:
        """Give up the sequence's device blocks from index `keep` on; all, if none before it is held."""
        if keep < len(sequence.blocks):
            sequence.fast_path_until = 0
            self._release(self.pool, sequence, sequence.blocks, keep)

    def release_copies(self, sequence: TokenSequence, keep: int) -> None:
        """Give up the sequence's host copies from index `keep` on; all, if none before it is held."""
        if keep < len(sequence.host_blocks):
            self._release(self.host, sequence, sequence.host_blocks, keep)

    def _release(self, pool: BlockPool, sequence: TokenSequence, blocks: list[BlockId], keep: int) -> None:
        pool.release(pool.groups.held(blocks[keep:], sequence.behind - keep))
        del blocks[keep if keep > sequence.behind or pool.groups.full else 0 :]
        if not (sequence.blocks or sequence.host_blocks):
            sequence.behind = 0

    def hold(self, sequence: TokenSequence, blocks: Sequence[BlockId], behind: int) -> None:
        """Give a sequence without device blocks those that it holds with so many `behind` its window, each with a
        reference.
        """
        sequence.behind, sequence.groups = behind, self.pool.groups
        sequence.blocks = self.pool.groups.spread(blocks, behind)

    def hold_copies(self, sequence: TokenSequence, blocks: Sequence[BlockId], behind: int) -> None:
        """Share host blocks with a sequence, as its next copies. So many of all its blocks lie `behind` its window."""
        if not blocks:
            return
        self.host.share(blocks)
        sequence.behind, sequence.groups = behind, self.pool.groups
        copies = sequence.host_blocks
        copies.extend(self.host.groups.spread(blocks, behind - len(copies)))
        self.slide(sequence)

    def _chain(self, sequence: TokenSequence, count: int, edits: InterventionLog) -> Iterator[BlockHash]:
        """Hashes of the first `count` stripes. A turn that waits for room asks at each step, and its history only
        grows, so it keeps them.
        """
        known = [] if edits or sequence.turn is None else sequence.turn.prefix_hashes
        for index in range(count):
            if index == len(known):
                known.append(self._hash(sequence, index, known[-1] if known else sequence.namespace, edits))
            yield known[index]

    def _hash(self, sequence: TokenSequence, index: int, parent: BlockHash, edits: InterventionLog) -> BlockHash:
        first, end = index * self.hash_tokens, (index + 1) * self.hash_tokens
        return chain_hash(parent, sequence.tokens[first:end], edits.fingerprint(first, end) if edits else b"")

    def _shared_with_others(self, sequence: TokenSequence) -> list[int]:
        """Indices of the sequence's blocks that its next tokens are written to and that others hold too."""
        first = self.pool.place_of(sequence.computed)
        return [i for i in range(first, len(sequence.blocks)) if self.pool.holders(sequence.blocks[i]) > 1]


def _part_of(identity: BlockHash, part: int) -> BlockHash:
    """What a block of a kept state is published under. It is longer than the hash of tokens."""
    return identity + part.to_bytes(4, "little")


def _find_state(pool: BlockPool, identity: BlockHash) -> list[BlockId]:
    """The blocks of a kept state; none if it lacks one."""
    found = pool.find_all([_part_of(identity, part) for part in range(pool.state_blocks)])
    blocks = [block for block in found if block is not None]
    return blocks if len(blocks) == len(found) else []
