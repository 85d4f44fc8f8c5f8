"""How the CPU's products read weights in blocks: a run of records, one for each group of inputs of a panel."""

from typing import Any

from llvmlite import ir
from numba import types

from app.gpu.linear.cpu_pairs import Pairs, is_paired
from app.gpu.linear.cpu_weights import INT32, INT64, PANEL, Dense, Loads, Use, Weights, for_range


class Blocks(Loads):
    """See `Weights`. Records are as `packing.BLOCKS` has them: a weight is `scale * quant + offset`, rounded once.

    Where there are no offsets, -0.0 stands for them: it changes nothing, not even the sign of a zero.
    """

    def __init__(self, record: Any, builder: Any, lanes: int, vectors: int) -> None:
        super().__init__(builder, lanes, vectors)
        self._record_bytes = record.size
        self._at = {name: field.offset for name, field in record.fields.items()}
        self._scale = ir.HalfType() if record.typeof("scales").dtype == types.float16 else ir.FloatType()
        self._in_pairs = "pairs" in record.fields
        quants = record.typeof("pairs" if self._in_pairs else "quants")
        self._lines, self._signed = quants.shape[0], quants.dtype.signed

    def each(self, weight: Any, column: Any, inputs: Any, use: Use) -> None:
        """See `Weights.each`."""
        builder, number = self._builder, self._number
        per_line = 2 if self._in_pairs else 1
        with for_range(builder, builder.sdiv(inputs, number(self._lines * per_line))) as group:
            record = builder.add(weight, builder.mul(group.index, number(self._record_bytes)))
            scales = self._load_scales(record, "scales", column)
            offsets = self._load_scales(record, "offsets", column)
            first = builder.mul(group.index, number(self._lines))
            quants = builder.add(record, number(self._at["pairs" if self._in_pairs else "quants"]))
            with for_range(builder, number(self._lines)) as line:
                place = builder.add(quants, builder.mul(line.index, number(PANEL)))
                term = builder.mul(builder.add(first, line.index), number(per_line))
                for part, values in enumerate(self._load_quants(place, column)):
                    use(
                        builder.add(term, number(part)),
                        [self.multiply_add(*each) for each in zip(scales, values, offsets, strict=True)],
                    )

    def _load_scales(self, record: Any, name: str, column: Any) -> list[Any]:
        """One vector for each of the outputs', as float32."""
        if name not in self._at:
            return [ir.Constant(self.floats, [-0.0] * self.lanes)] * self.vectors
        loaded = self._load(self._builder.add(record, self._number(self._at[name])), self._scale, column)
        return [each if each.type == self.floats else self._builder.fpext(each, self.floats) for each in loaded]

    def _load_quants(self, place: Any, column: Any) -> list[list[Any]]:
        """The vectors of one input, or of the two whose quants share bytes, as float32."""
        builder, wide = self._builder, ir.VectorType(INT32, self.lanes)
        extend = builder.sext if self._signed else builder.zext
        loaded = [extend(each, wide) for each in self._load(place, ir.IntType(8), column)]
        if not self._in_pairs:
            return [self._to_floats(loaded)]
        if self._signed:
            low = [builder.ashr(builder.shl(each, self._splat(28)), self._splat(28)) for each in loaded]
            high = [builder.ashr(each, self._splat(4)) for each in loaded]
        else:
            low = [builder.and_(each, self._splat(15)) for each in loaded]
            high = [builder.lshr(each, self._splat(4)) for each in loaded]
        return [self._to_floats(low), self._to_floats(high)]

    def _to_floats(self, numbers: list[Any]) -> list[Any]:
        return [self._builder.sitofp(each, self.floats) for each in numbers]

    @staticmethod
    def _number(value: int) -> Any:
        return ir.Constant(INT64, value)


def weights_of(element: Any, builder: Any, lanes: int, vectors: int, *, ahead: bool = False) -> Weights:
    """For weights of Numba's type `element`, in `vectors` vectors of `lanes` outputs. `ahead` is as `Pairs` has it."""
    if is_paired(element):
        return Pairs(builder, lanes, vectors, ahead=ahead)
    if isinstance(element.dtype, types.Record):
        return Blocks(element.dtype, builder, lanes, vectors)
    return Dense(element.dtype, builder, lanes, vectors)
