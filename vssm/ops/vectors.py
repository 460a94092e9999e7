"""What the CPU kernels are written with: float32 vectors, elementary functions, tiles and tasks.

A *row* holds LANES numbers, one register; a *block* is four rows. A processor starts two
multiply-adds per cycle but each takes four cycles, so four independent rows keep it busy.

    exp(x) = 2^k (1 + q)      x log2(e) = k + r, k an integer, |r| <= 1/2, q = 2^r - 1 = r p(r)

p is a minimax polynomial with a relative error of 4e-7. q has no constant term and the scan never
adds it to 1, so a decay very close to 1 loses no digits. Memory is addressed by 64-bit integers.

A kernel is `function(words, scratch)`. `words` is the address of a table of 64-bit words: sizes,
then an address and two strides in bytes (batch, time) for each operand that has steps, then the
addresses of the other operands. Address 0 means that the operand is not given. The words have the
names of the scan's operands (`vssm.ops.scan.numba`); other kernels say what they use them for.
BATCH sequences fill NUM_ROWS rows of LENGTH steps: one row each or, given the address STARTS of
their first steps, all in one row. The longest has LONGEST steps.

A *tile* is LANES channels that go through time together. A *group* is several tiles. A *task* is a
group and a range of batch rows; threads draw tasks from a counter. Kernels read and write whole
rows of LANES channels, four steps at a time. Channels, steps and states that do not fill a row or a
block go through a buffer that is padded with zeros.
"""
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, ANN401 (numba infers the types)

import functools
import hashlib
import inspect
import math
import operator
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
ROW = 4 * LANES  # bytes
BLOCK = 4 * ROW
LOG2E, LN2 = math.log2(math.e), math.log(2)
# x + ROUND is rounded to k + ROUND with an integer k, and its lowest bits are the exponent of 2^k.
ROUND = 1.5 * 2**23 + 127

_float, _int, _word, _byte = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)


class Vector(types.Type):
    """The numba type of several rows held in registers."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__(name=f"Vector({rows})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, ir.VectorType(_float, kind.rows * LANES))


row, block = Vector(1), Vector(4)


def _operation(emit: Callable, result: Any = None) -> Any:
    """Turns `emit(builder, *values)`, which emits instructions, into a function for numba code.

    The result has the given type, or the type of the first vector argument. If any argument is a
    vector, numbers are broadcast to vectors.
    """

    def typed(typing, *given):
        exact = [types.float64 if isinstance(kind, types.Float) else kind for kind in given]
        exact = [types.int64 if isinstance(kind, types.Integer) else kind for kind in exact]
        return (result or _kind(exact))(*exact), functools.partial(_lower, emit)

    # numba reads the number of arguments from here.
    vars(typed)["__signature__"] = inspect.signature(emit)
    return intrinsic(typed)


def _kind(given) -> Any:
    return next((kind for kind in given if isinstance(kind, Vector)), None)


def _lower(emit, context, builder, signature, values):
    kind = _kind(signature.args)
    values = [
        _filled(builder, kind, value) if kind and isinstance(given, types.Float) else value
        for value, given in zip(values, signature.args, strict=True)
    ]
    made = emit(builder, *values)
    return context.get_dummy_value() if made is None else made


def _filled(builder, kind, number):
    one = ir.Constant(ir.VectorType(_float, 1), ir.Undefined)
    one = builder.insert_element(one, builder.fptrunc(number, _float), ir.Constant(_int, 0))
    return _shuffle(builder, one, one, [0] * kind.rows * LANES)


def _shuffle(builder, x, y, index) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_int, len(index)), index))


def _load(builder, address, kind):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _store(builder, address, x):
    builder.store(x, builder.inttoptr(address, x.type.as_pointer()), align=4)


def _call(builder, name, result, *values):
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _muladd(builder, x, y, z):
    return _call(builder, f"llvm.fmuladd.v{x.type.count}f32", x.type, x, y, z)


def _bits(builder, x):
    """Returns the bits of x as integers, and a function that makes integer constants."""
    kind = ir.VectorType(_int, x.type.count)
    return builder.bitcast(x, kind), lambda value: ir.Constant(kind, [value] * kind.count)


def _power(builder, x):
    bits, constant = _bits(builder, x)
    return builder.bitcast(builder.shl(bits, constant(23)), x.type)


def _exponent(builder, x):
    bits, constant = _bits(builder, x)
    return builder.sitofp(builder.sub(builder.lshr(bits, constant(23)), constant(126)), x.type)


def _mantissa(builder, x):
    bits, constant = _bits(builder, x)
    digits = builder.and_(bits, constant(0x7FFFFF))
    return builder.bitcast(builder.or_(digits, constant(0x3F000000)), x.type)


def _exceeds(builder, x, y):
    bits = builder.bitcast(builder.fcmp_ordered(">", x, y), ir.IntType(x.type.count))
    return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))


def _rows(builder, x):
    return [
        _shuffle(builder, x, x, list(range(i, i + LANES))) for i in range(0, x.type.count, LANES)
    ]


def _fold(builder, x, y, total):
    for x_row, y_row in zip(_rows(builder, x), _rows(builder, y), strict=True):
        total = _muladd(builder, x_row, y_row, total)
    return total


def _load_rows(builder, address, stride):
    rows = []
    for _ in range(4):
        rows.append(_load(builder, address, ir.VectorType(_float, LANES)))
        address = builder.add(address, stride)
    first, second = (
        _shuffle(builder, x, y, list(range(2 * LANES))) for x, y in (rows[:2], rows[2:])
    )
    return _shuffle(builder, first, second, list(range(4 * LANES)))


def _store_rows(builder, address, stride, x):
    for x_row in _rows(builder, x):
        _store(builder, address, x_row)
        address = builder.add(address, stride)


def _gather(builder, x, y, total):
    rows, width = [*_rows(builder, x), *_rows(builder, y)], LANES
    while len(rows) > 1:
        width //= 2
        keep = [i + LANES if i & width else i for i in range(LANES)]
        swap = [(i ^ width) + LANES if i & width else i ^ width for i in range(LANES)]
        pairs = zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)
        rows = [
            builder.fadd(_shuffle(builder, x, y, keep), _shuffle(builder, x, y, swap))
            for x, y in pairs
        ]
    return builder.fadd(rows[0], total)


def _store_gathered(builder, x_address, y_address, sums):
    while sums.type.count > 8:
        even = list(range(0, sums.type.count, 2))
        odd = [i + 1 for i in even]
        sums = builder.fadd(_shuffle(builder, sums, sums, even), _shuffle(builder, sums, sums, odd))
    _store(builder, x_address, _shuffle(builder, sums, sums, [0, 1, 2, 3]))
    _store(builder, y_address, _shuffle(builder, sums, sums, [4, 5, 6, 7]))


def _spread(builder, address):
    four = _load(builder, address, ir.VectorType(_float, 4))
    return _shuffle(builder, four, four, [i // LANES for i in range(4 * LANES)])


def _transpose(builder, source, stride, target, target_stride):
    rows = []
    for _ in range(LANES):
        rows.append(_load(builder, source, ir.VectorType(_float, LANES)))
        source = builder.add(source, stride)
    low = [i // 2 + LANES * (i % 2) for i in range(LANES)]
    high = [i + LANES // 2 for i in low]
    for _ in range(LANES.bit_length() - 1):
        pairs = list(zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True))
        rows = [_shuffle(builder, x, y, index) for x, y in pairs for index in (low, high)]
    for x in rows:
        _store(builder, target, x)
        target = builder.add(target, target_stride)


def _prefetch(builder, address):
    read, all_caches, data = (ir.Constant(_int, i) for i in (0, 3, 1))
    pointer = builder.inttoptr(address, _byte.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, all_caches, data)


def _draw(builder, counter):
    pointer = builder.inttoptr(counter, _word.as_pointer())
    return builder.atomic_rmw("add", pointer, ir.Constant(_word, 1), "monotonic")


def _set_float_mode(builder, mode):
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return mode
    memory = cgutils.alloca_once(builder, _int)
    pointer = builder.bitcast(memory, _byte.as_pointer())
    _call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), pointer)
    before = builder.load(memory)
    builder.store(builder.trunc(mode, _int), memory)
    _call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), pointer)
    return builder.zext(before, _word)


_row_kind, _block_kind = ir.VectorType(_float, LANES), ir.VectorType(_float, 4 * LANES)

zero_row = _operation(lambda b: ir.Constant(_row_kind, None), row)
load_row = _operation(lambda b, address: _load(b, address, _row_kind), row)
load_block = _operation(lambda b, address: _load(b, address, _block_kind), block)
load_rows = _operation(_load_rows, block)  # four rows at a stride
load_number = _operation(lambda b, address: _load(b, address, _float), types.float32)
load_word = _operation(
    lambda b, words, i: _load(b, b.add(words, b.shl(i, i.type(3))), _word), types.int64
)
store = _operation(_store, types.none)  # a row, a block or a word
store_rows = _operation(_store_rows, types.none)  # four rows at a stride
store_number = _operation(
    lambda b, address, x: _store(b, address, b.fptrunc(x, _float)), types.none
)
spread = _operation(_spread, block)  # four numbers in memory, each repeated to a row
repeat = _operation(lambda b, x: _shuffle(b, x, x, list(range(LANES)) * 4), block)  # a row, 4 times
muladd = _operation(_muladd)  # x y + z
fold = _operation(_fold, row)  # the row z plus the sum over rows of x y
# Adds the sums of the rows of x and y to z, LANES / 8 lanes for each sum.
gather = _operation(_gather, row)
store_gathered = _operation(_store_gathered, types.none)  # the four sums of x and the four of y
transpose = _operation(_transpose, types.none)  # LANES rows of LANES numbers
power = _operation(_power)  # 2^k from k + ROUND
maximum = _operation(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), y, x))
minimum = _operation(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), y, x))
exponent = _operation(_exponent)  # k of x = 2^k m with 1/2 <= m < 1, for a normal x > 0
mantissa = _operation(_mantissa)  # m of the same
if_less = _operation(lambda b, x, y, then, other: b.select(b.fcmp_ordered("<", x, y), then, other))
if_equal = _operation(
    lambda b, x, y, then, other: b.select(b.fcmp_ordered("==", x, y), then, other)
)
exceeds = _operation(_exceeds, types.boolean)  # whether x > y anywhere
prefetch = _operation(_prefetch, types.none)
draw = _operation(_draw, types.int64)  # the next number of a counter that threads share
# Returns the previous mode. Denormals are a hundred times slower than other numbers: FLUSH makes
# them zero.
set_float_mode = _operation(_set_float_mode, types.int64)
FLUSH = 0x9FC0  # the x86 default with "denormals are zero" and "flush to zero"


def _operator(symbol: Callable, method: str) -> None:
    # `overload` is shorter but compiles a function for every pair of types.
    type_callable(symbol)(lambda context: lambda x, y: _kind((x, y)))
    for kinds in ((Vector, Vector), (Vector, types.Float), (types.Float, Vector)):
        emit = functools.partial(_lower, lambda builder, x, y: getattr(builder, method)(x, y))
        lower_builtin(symbol, *kinds)(lambda *code, emit=emit: emit(*code))


for _symbol, _method in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _operator(getattr(operator, _symbol), _method)

options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inline: Any = njit(forceinline=True, **options)
compiled: Any = njit(**options)

_digest = hashlib.sha256()
for _path in sorted(Path(__file__).parent.rglob("*.py")):
    _digest.update(_path.name.encode() + _path.read_bytes())
SOURCES = _digest.hexdigest()[:12]


def kernel(function: Callable) -> Callable:
    """Compiles `function(words, scratch)` at its first call and caches it on disk if possible."""
    # numba names the file after the function and watches the source of that function alone. With
    # the digest, a change of any source gives the file another name.
    function.__qualname__ = f"{function.__qualname__}_{SOURCES}"
    try:
        return njit(error_model="numpy", nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can hold the compiled kernel
        return njit(error_model="numpy", nogil=True)(function)


@inline
def exp2(x, y, bounded):
    """Returns q and s with 2^(x y) = s (1 + q); `bounded` promises that |x y| <= 126."""
    if bounded:
        k = muladd(x, y, ROUND)
        r = muladd(x, y, ROUND - k)
    else:
        product = minimum(maximum(x * y, -127.0), 127.0)
        k = product + ROUND
        r = product - (k - ROUND)
    p = muladd(r, 0.001333353857803396, 0.009666245424315144)
    p = muladd(r, p, 0.05550500213803258)
    p = muladd(r, p, 0.24022351343155882)
    p = muladd(r, p, 0.6931471435060839)
    return p * r, power(k)


@inline
def exp(x):
    q, s = exp2(minimum(maximum(x, -87.0), 87.0), LOG2E, True)
    return muladd(q, s, s)


@inline
def log(x):
    """Computes k log(2) + log(1 + f) with x = 2^k (1 + f); the polynomial of Cephes' logf."""
    k, m = exponent(x), mantissa(x)
    f = if_less(m, 0.7071067811865476, m + m, m) - 1.0
    k = if_less(m, 0.7071067811865476, k - 1.0, k)
    p = muladd(f, 0.070376836292, -0.11514610310)
    p = muladd(f, p, 0.11676998740)
    p = muladd(f, p, -0.12420140846)
    p = muladd(f, p, 0.14249322787)
    p = muladd(f, p, -0.16668057665)
    p = muladd(f, p, 0.20000714765)
    p = muladd(f, p, -0.24999993993)
    p = muladd(f, p, 0.33333331174)
    square = f * f
    # log(2) comes in two parts, the larger of which is exact.
    p = muladd(k, -2.12194440e-4, p * f * square - 0.5 * square)
    return muladd(k, 0.693359375, f + p)


@inline
def sigmoid(x):
    return 1.0 / (1.0 + exp(0.0 - x))


@inline
def softplus(x):
    """Computes max(x, 0) + log(1 + e), e = exp(-|x|), by a minimax polynomial of log(1 + e) / e."""
    e = exp(minimum(x, 0.0 - x))
    p = muladd(e, 0.005232692698679005, -0.02950523250293209)
    p = muladd(e, p, 0.07822594165806147)
    p = muladd(e, p, -0.13663244927424786)
    p = muladd(e, p, 0.19106006352523827)
    p = muladd(e, p, -0.24842982109180178)
    p = muladd(e, p, 0.33319096794371283)
    p = muladd(e, p, -0.4999949313984246)
    p = muladd(e, p, 0.9999999698795097)
    return muladd(e, p, maximum(x, 0.0))


@inline
def softplus_derivative(y):
    """Computes 1 - exp(-y) for the softplus y, accurate for small y too."""
    q, s = exp2(minimum(y, 87.0), -LOG2E, True)
    return (1.0 - s) - q * s


# From numpy, because numba compiles a function again for every Python integer passed to it.
TASK, TASKS, PER_TASK, PER_GROUP, BATCH, LENGTH, CHANNELS, COUNT, FLAG = np.arange(9)
STARTS, NUM_ROWS, LONGEST = np.arange(9, 12)
U, DT, Z, B_, C_, Y, DU, DDT, DZ = np.arange(12, 39, 3)
A_, D_, BIAS, H0, H, DB, DC, DA, DD, DBIAS, DH0 = np.arange(39, 50)


@inline
def draw_task(words):
    """Returns the next group, its tiles and its batch rows; no tiles when all tasks are drawn."""
    task, per_group = draw(words), load_word(words, PER_GROUP)
    tiles = -(-load_word(words, CHANNELS) // LANES)
    groups = -(-tiles // per_group)
    first, b = task % groups * per_group, task // groups * load_word(words, PER_TASK)
    last = min(first + per_group, tiles) if task < load_word(words, TASKS) else first
    b_last = min(b + load_word(words, PER_TASK), load_word(words, BATCH))
    return task % groups, first, last, b, b_last


@inline
def sequence(words, b):
    """Returns the row of sequence b, its first step there, and its length."""
    starts = load_word(words, STARTS)
    if starts:
        first = load_word(starts, b)
        return 0 * b, first, load_word(starts, b + 1) - first
    return b, 0 * b, load_word(words, LENGTH)


@inline
def after(words, row, step):
    """Returns the row and the step that follow the last step of a sequence."""
    return (row, step) if load_word(words, STARTS) else (row + 1, 0 * step)


@inline
def width_of(words, channel):
    """Returns how many channels the tile that starts at a channel has."""
    return min(LANES, load_word(words, CHANNELS) - channel)


@inline
def clear(target, rows):
    for i in range(rows):
        store(target + ROW * i, zero_row())


@compiled
def copy(source, source_stride, target, target_stride, steps, count, padded):
    """Copies `count` numbers per step and adds zeros up to `padded`."""
    for t in range(steps):
        x, y = source + source_stride * t, target + target_stride * t
        n = 0
        while n + LANES <= count:
            store(y + 4 * n, load_row(x + 4 * n))
            n += LANES
        while n < padded:
            store_number(y + 4 * n, load_number(x + 4 * n) if n < count else types.float32(0.0))
            n += 1


@inline
def place(words, which, b, t, channel):
    """Returns the address (0 if not given) and time stride of an operand at row, step, channel."""
    address, stride = load_word(words, which), load_word(words, which + 2)
    at = address + load_word(words, which + 1) * b + stride * t + 4 * channel
    return (at if address else 0), stride


@inline
def place_states(words, which, b, channel):
    address, count = load_word(words, which), load_word(words, COUNT)
    return address + 4 * count * (load_word(words, CHANNELS) * b + channel) if address else 0


@compiled
def read(words, which, b, t, channel, steps, buffer):
    """Returns where rows can be read by blocks: in place, or in a zero-padded copy."""
    address, stride = place(words, which, b, t, channel)
    width = width_of(words, channel)
    if not address or (width == LANES and steps % 4 == 0):
        return address, stride
    copy(address, stride, buffer, ROW, steps, width, LANES)
    clear(buffer + ROW * steps, -steps % 4)
    return buffer, ROW


@compiled
def write(words, which, b, t, channel, steps, buffer):
    """Returns where rows can be written by blocks: in place, or in a buffer (see `written`)."""
    if width_of(words, channel) == LANES and steps % 4 == 0:
        return place(words, which, b, t, channel)
    return buffer, ROW


@compiled
def written(words, which, b, t, channel, steps, buffer):
    """Moves what `write` sent to a buffer to its place."""
    address, stride = place(words, which, b, t, channel)
    if buffer != address and address:
        width = width_of(words, channel)
        copy(buffer, ROW, address, stride, steps, width, width)


@compiled
def read_numbers(words, which, b, t, steps, buffer):
    """Returns where B or C can be read with states rounded up to 4: in place or in a copy."""
    address, stride = place(words, which, b, t, 0)
    count = load_word(words, COUNT)
    states = -(-count // 4) * 4
    if count == states:
        return address, stride
    copy(address, stride, buffer, 4 * states, steps, count, states)
    return buffer, 4 * states


@compiled
def read_vector(words, which, channel, buffer):
    """Returns a tile's channels of a vector as a block of equal rows; zeros if not given."""
    width = width_of(words, channel) if load_word(words, which) else 0
    copy(load_word(words, which) + 4 * channel, 0, buffer, 0, 1, width, LANES)
    return repeat(load_row(buffer))


@compiled
def read_states(words, which, b, channel, target):
    """Lays out (channels, states) as (states rounded up to 4, LANES), padded with zeros."""
    source, count = place_states(words, which, b, channel), load_word(words, COUNT)
    width = width_of(words, channel)
    for n in range(0, count, LANES):
        if source and width == LANES and n + LANES <= count:
            transpose(source + 4 * n, 4 * count, target + ROW * n, ROW)
            continue
        for m in range(n, min(n + LANES, -(-count // 4) * 4)):
            store(target + ROW * m, zero_row())
            for c in range(width if source and m < count else 0):
                store_number(target + ROW * m + 4 * c, load_number(source + 4 * (count * c + m)))


@compiled
def write_states(words, which, b, channel, source):
    """The inverse of `read_states`."""
    target, count = place_states(words, which, b, channel), load_word(words, COUNT)
    width = width_of(words, channel)
    for n in range(0, count if target else 0, LANES):
        if width == LANES and n + LANES <= count:
            transpose(source + ROW * n, ROW, target + 4 * n, 4 * count)
            continue
        for m in range(n, min(n + LANES, count)):
            for c in range(width):
                store_number(target + 4 * (count * c + m), load_number(source + ROW * m + 4 * c))


@inline
def hint(words, which, b, t, channel, target):
    """Notes where an operand will be read next, for `prefetch`."""
    address, stride = place(words, which, b, t, channel)
    store(target, address)
    store(target + 8, stride)
