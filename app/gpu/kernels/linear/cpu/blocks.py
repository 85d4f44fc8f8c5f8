"""How the CPU's products read weights in blocks: a run of records, one for each group of inputs of a panel."""

from typing import Any

from llvmlite import ir
from numba import types

from app.gpu.kernels.linear.cpu.pairs import Pairs, is_paired, multiply_pairs, prefetch_run, round_to_pairs
from app.gpu.kernels.linear.cpu.weights import INT32, INT64, PANEL, Dense, Loads, Use, Weights, for_range

ROUNDED = "rounded_"
"""What the name of the quants begins with in records for products in bfloat16; then comes that in all others."""
_PAIRS = "pairs"
"""The name of quants of which a byte has two."""


class Blocks(Loads):
    """See `Weights`. Records are as `packing.BLOCKS` has them: a weight is `scale * quant + offset`, rounded once.

    Where there are no offsets, -0.0 stands for them: it changes nothing, not even the sign of a zero.
    """

    def __init__(self, record: Any, builder: Any, lanes: int, vectors: int, *, ahead: bool) -> None:
        """`ahead`: whether to prefetch what follows all the blocks that are read."""
        super().__init__(builder, lanes, vectors)
        self._ahead = ahead
        self._record_bytes = record.size
        self._at = {name: field.offset for name, field in record.fields.items()}
        self._scale = ir.HalfType() if record.typeof("scales").dtype == types.float16 else ir.FloatType()
        self._quants = _name_of_quants(record)
        self._in_pairs = self._quants.endswith(_PAIRS)
        quants = record.typeof(self._quants)
        self._lines, self._signed = quants.shape[0], quants.dtype.signed

    def each(self, weight: Any, column: Any, inputs: Any, use: Use) -> None:
        """See `Weights.each`."""
        builder, number = self._builder, self._number
        pairs, lines = (self._lines, 1) if self._in_pairs else (self._lines // 2, 2)
        groups = builder.sdiv(inputs, number(2 * pairs))
        behind = builder.mul(groups, number(self._record_bytes))
        with for_range(builder, groups) as group:
            record = builder.add(weight, builder.mul(group.index, number(self._record_bytes)))
            scales = self._load_scales(record, "scales", column)
            offsets = self._load_scales(record, "offsets", column)
            if self._ahead:
                prefetch_run(builder, builder.add(record, behind), self._record_bytes)
            first = builder.mul(group.index, number(pairs))
            quants = builder.add(record, number(self._at[self._quants]))
            with for_range(builder, number(pairs)) as pair:
                place = builder.add(quants, builder.mul(pair.index, number(lines * PANEL)))
                values = [
                    [self._scale_up(*each) for each in zip(scales, quant, offsets, strict=True)]
                    for line in range(lines)
                    for quant in self._load_quants(builder.add(place, number(line * PANEL)), column)
                ]
                self._give(use, builder.add(first, pair.index), *values)

    def _give(self, use: Use, pair: Any, left: list[Any], right: list[Any]) -> None:
        """Write `use` for the two inputs of number `pair`, whose weights are given."""
        term = self._builder.mul(pair, self._number(2))
        use(term, left)
        use(self._builder.add(term, self._number(1)), right)

    def _scale_up(self, scale: Any, quant: Any, offset: Any) -> Any:
        return Loads.multiply_add(self, scale, quant, offset)

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


class RoundedBlocks(Blocks):
    """As `Blocks`, for products in bfloat16: each weight is rounded to it, and a term is a pair of inputs."""

    terms = INT32

    def multiply_add(self, left: Any, right: Any, addend: Any) -> Any:
        """See `multiply_pairs`."""
        return multiply_pairs(self._builder, left, right, addend)

    def _give(self, use: Use, pair: Any, left: list[Any], right: list[Any]) -> None:
        use(pair, [round_to_pairs(self._builder, *each) for each in zip(left, right, strict=True)])


def is_rounded(element: Any) -> bool:
    """Whether Numba's type `element` stands for blocks whose weights are rounded to bfloat16."""
    return isinstance(element.dtype, types.Record) and _name_of_quants(element.dtype).startswith(ROUNDED)


def is_in_pairs(element: Any) -> bool:
    """Whether Numba's type `element` stands for blocks with two quants in a byte."""
    return isinstance(element.dtype, types.Record) and _name_of_quants(element.dtype).endswith(_PAIRS)


def _name_of_quants(record: Any) -> str:
    """Of the last field."""
    *_, name = record.fields
    return str(name)


def multiplies_rounded(element: Any) -> bool:
    """Whether inputs are bfloat16 where they meet weights of Numba's type `element`."""
    return is_paired(element) or is_rounded(element)


def weights_of(element: Any, builder: Any, lanes: int, vectors: int, *, ahead: bool = False) -> Weights:
    """For weights of Numba's type `element`, in `vectors` vectors of `lanes` outputs. `ahead` is as `Pairs` has it."""
    if isinstance(element.dtype, types.Record):
        if is_rounded(element):
            return RoundedBlocks(element.dtype, builder, lanes, vectors, ahead=ahead)
        if is_paired(element):
            return Pairs(builder, lanes, vectors, ahead=ahead)
        return Blocks(element.dtype, builder, lanes, vectors, ahead=ahead)
    return Dense(element.dtype, builder, lanes, vectors)
