"""Changing the residual stream of a paused turn, and noting the change in case the KV is lost and recomputed."""

from app.domain.breakpoints import Edit, EditOp, Intervention
from app.domain.errors import FieldOutOfRange
from app.gpu.commands.whitebox.checkpoint_reads import checkpoint_of, chosen_span
from app.gpu.state.checkpoints import Checkpoint, StoredTensor
from app.gpu.state.sequence import TokenSequence
from app.messages import WriteCheckpoint


def edit_checkpoint(sequence: TokenSequence, edits: tuple[Edit, ...]) -> None:
    """Apply all edits, or none. Raises `WrongState`, and `FieldOutOfRange` for a field of one of them."""
    checkpoint = checkpoint_of(sequence)
    sequence.interventions.check_pass("edits", checkpoint.first, checkpoint.end, more=len(edits))
    tensors = {edit.vector for edit in edits if edit.vector is not None}
    sequence.interventions.check("edits", more=len(edits), more_bytes=sum(len(each.data) for each in tensors))
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
    sequence.interventions.check_pass("activation", checkpoint.first, checkpoint.end, more=1)
    sequence.interventions.check("activation", more=1, more_bytes=len(tensor.data))
    sequence.interventions.forget(checkpoint.boundary, checkpoint.first, checkpoint.end)
    edit = Edit(EditOp.REPLACE, vector=tensor)
    made = Intervention(checkpoint.first, checkpoint.end, checkpoint.boundary, edit)
    _put_back(sequence, checkpoint, checkpoint.hidden.edited(0, checkpoint.length, edit), [made])


def _put_back(sequence: TokenSequence, checkpoint: Checkpoint, hidden: StoredTensor, made: list[Intervention]) -> None:
    checkpoint.hidden = hidden
    for intervention in made:
        sequence.interventions.add(intervention)
