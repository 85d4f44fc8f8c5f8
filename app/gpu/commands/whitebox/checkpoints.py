"""Carrying out commands about checkpoints and captures that need the model, the store, or the room for activations."""

import time
from collections.abc import Callable

from app.domain.activations import CheckpointLens, LensPosition, LensRows
from app.domain.breakpoints import TensorData
from app.gpu.commands.whitebox.activation_maps import Predict, map_lens
from app.gpu.commands.whitebox.checkpoint_reads import checkpoint_of, chosen_span
from app.gpu.kv.placement import Placement
from app.gpu.planning.turns import Match
from app.gpu.state.activation_room import ActivationRoom
from app.gpu.state.checkpoints import Checkpoint, StoredTensor
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState
from app.messages import Lens, MapLens, Reinstate


class CheckpointHandler:
    """Reads checkpoints through the model, and puts those of another engine in place."""

    def __init__(
        self,
        placement: Placement,
        predict: Predict,
        store: Callable[[TensorData], StoredTensor],
        match: Match,
        activations: ActivationRoom,
    ) -> None:
        self._placement = placement
        self._predict = predict
        self._store = store
        self._match = match
        self._activations = activations

    def lens(self, sequence: TokenSequence, command: Lens) -> CheckpointLens:
        """The most likely tokens at some positions of the checkpoint. Raises `WrongState`, `FieldOutOfRange`."""
        began, checkpoint = time.perf_counter(), checkpoint_of(sequence)
        first, end = chosen_span(checkpoint, command.positions)
        chosen = (checkpoint.hidden, first - checkpoint.first, end - checkpoint.first)
        rows = self._predict([chosen], command.top_k)
        positions = tuple(
            LensPosition(position, sequence.tokens[position], tuple(top))
            for position, top in zip(range(first, end), rows, strict=True)
        )
        return CheckpointLens(positions, time.perf_counter() - began)

    def map_lens(self, sequence: TokenSequence, command: MapLens) -> LensRows:
        """The same for a slice of the session's map. Raises `WrongState`."""
        return map_lens(sequence, command, self._predict)

    def clear_captures(self, sequence: TokenSequence) -> None:
        """Forget what has been captured."""
        sequence.captures.clear()
        self._activations.note(sequence)

    def reinstate(self, sequence: TokenSequence, command: Reinstate) -> None:
        """Give a session that has just been imported what it had when it was exported. Raises `FieldOutOfRange` if what
        the turn has generated does not match its grammar, `ActivationsFull`.
        """
        if command.paused is not None:
            self._activations.check(sequence, len(command.paused.hidden.data))
        sequence.breakpoints = {each.id: each for each in command.breakpoints}
        sequence.interventions = InterventionLog(command.interventions)
        sequence.assume_computed()
        paused = command.paused
        if paused is None or command.turn is None:
            return
        info, grammar = paused.checkpoint, paused.sampling.grammar
        generated = sequence.tokens[paused.prompt_tokens :]
        matcher = None if grammar is None else self._match(grammar, generated)
        self._placement.cut(sequence, info.first)
        sequence.interventions = InterventionLog(paused.interventions)
        sequence.reached = info.first
        sequence.turn = TurnState(
            command.turn,
            paused.sampling,
            paused.stop,
            paused.prompt_tokens,
            kept=paused.prompt_tokens,
            interventions=command.interventions,
            matcher=matcher,
            paused=True,
            cached_tokens=paused.cached_tokens,
            tokens_recomputed=paused.tokens_recomputed,
        )
        sequence.checkpoint = Checkpoint(
            info.layer + 1,
            info.first,
            info.end - info.first,
            self._store(paused.hidden),
            info.in_pass,
            info.breakpoint,
            info.created_at,
            held=False,
        )
        self._activations.note(sequence)
