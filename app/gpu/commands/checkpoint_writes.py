"""Changing the residual stream of a paused turn, and noting the change in case the KV is lost and computed again."""

from app.domain.breakpoints import MAX_INTERVENTIONS, Edit, EditOp, Intervention
from app.domain.errors import FieldOutOfRange
from app.gpu.commands.checkpoint_reads import checkpoint_of, chosen_span
from app.gpu.state.checkpoints import Checkpoint, StoredTensor
from app.gpu.state.sequence import TokenSequence
from app.messages import WriteCheckpoint

MAX_WRITTEN_BYTES = 64 << 20
"""Limit of the activations that a client has written to one session, in memory and in the journal."""


def edit_checkpoint(sequence: TokenSequence, edits: tuple[Edit, ...]) -> None:
    """Apply all edits, or none. Raises `WrongState`, and `FieldOutOfRange` for a field of one of them."""
    checkpoint = checkpoint_of(sequence)
    if len(sequence.interventions) + len(edits) > MAX_INTERVENTIONS:
        raise FieldOutOfRange(
            f"the session's KV has been computed with {len(sequence.interventions)} edits; at most "
            f"{MAX_INTERVENTIONS} are kept",
            param="edits",
        )
    hidden, made = checkpoint.hidden, []
    for index, edit in enumerate(edits):
        first, end = chosen_span(checkpoint, edit.positions, param=f"edits.{index}.positions")
        hidden = hidden.edited(first - checkpoint.first, end - checkpoint.first, edit)
        made.append(Intervention(first, end, checkpoint.boundary, edit))
    if not hidden.is_finite():
        raise FieldOutOfRange("the edits lead to values that are not finite numbers", param="edits")
    _put_back(sequence, checkpoint, hidden, made)


def write_checkpoint(sequence: TokenSequence, command: WriteCheckpoint) -> None:
    """Put a client's activation in the place of the whole checkpoint. Raises `WrongState`, `FieldOutOfRange`."""
    checkpoint, tensor = checkpoint_of(sequence), command.tensor
    if (tensor.dtype, tensor.shape) != (checkpoint.hidden.dtype, checkpoint.hidden.shape):
        raise FieldOutOfRange(
            f"the activation must be {checkpoint.hidden.dtype} {list(checkpoint.hidden.shape)}, "
            f"not {tensor.dtype} {list(tensor.shape)}",
            param="activation",
        )
    if sequence.interventions.written_bytes + len(tensor.data) > MAX_WRITTEN_BYTES:
        raise FieldOutOfRange(
            f"the session keeps {sequence.interventions.written_bytes} bytes of written activations, in case its KV is "
            f"lost; at most {MAX_WRITTEN_BYTES} are kept",
            param="activation",
        )
    sequence.interventions.forget(checkpoint.boundary, checkpoint.first, checkpoint.end)
    edit = Edit(EditOp.REPLACE, vector=tensor)
    made = Intervention(checkpoint.first, checkpoint.end, checkpoint.boundary, edit)
    _put_back(sequence, checkpoint, checkpoint.hidden.edited(0, checkpoint.length, edit), [made])


def _put_back(sequence: TokenSequence, checkpoint: Checkpoint, hidden: StoredTensor, made: list[Intervention]) -> None:
    checkpoint.hidden = hidden
    for intervention in made:
        sequence.interventions.add(intervention)
