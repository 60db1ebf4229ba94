"""One small call for every primitive with a rule, and for each set of parameters that its rule tells apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import jax
import jax.extend.core
import jax.extend.core.primitives as primitives
import jax.extend.random
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

import shardc
from shardc.ir.ranges import conv_of_ranges_p, join_ranges_p
from shardc.sbp.rules.in_order import in_order_p
from tests import attention_on_cpu

RNG: Final = np.random.default_rng(0)
CASES: Final[dict[str, tuple[Callable[..., Any], tuple[Any, ...], str | None]]] = {}
"""Name -> function, arguments, primitive (None: the last equation)."""


def case(name: str, fn: Callable[..., Any], *args: Any, primitive: str | None = None) -> None:
    """Add a case; its arguments are made with x64 on, as NumPy arrays."""
    assert name not in CASES, name
    CASES[name] = (fn, args, primitive)


@cache
def primitive_of(name: str) -> str:
    """The primitive of a case."""
    fn, args, primitive = CASES[name]
    with jax.enable_x64(True):
        return primitive or jax.make_jaxpr(fn)(*args).jaxpr.eqns[-1].primitive.name


def floats(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def positive(*shape: int) -> np.ndarray:
    return np.abs(floats(*shape)) + 0.1


def ints(*shape: int, low: int = -50, high: int = 50, dtype: Any = np.int32) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, shape).astype(bool)


def cplx(*shape: int) -> np.ndarray:
    return floats(*shape) + 1j * floats(*shape)


# --- elementwise ---
X, Y, N, M, T = floats(4), floats(4), ints(4), ints(4), bools(4)
UNIT = np.clip(floats(4) / 4, -0.9, 0.9)
for fn in (lax.abs, lax.asinh, lax.atan, lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.erf, lax.erfc, lax.exp, lax.exp2,
           lax.expm1, lax.floor, lax.is_finite, lax.logistic, lax.neg, lax.round, lax.sign, lax.sin, lax.sinh,
           lax.square, lax.tan, lax.tanh, lax.bessel_i0e, lax.bessel_i1e, lax.stop_gradient):  # fmt: skip
    case(fn.__name__, fn, X)
for fn in (lax.acos, lax.asin, lax.atanh, lax.erf_inv):
    case(fn.__name__, fn, UNIT)
for fn in (lax.digamma, lax.lgamma, lax.log, lax.log1p, lax.rsqrt, lax.sqrt):
    case(fn.__name__, fn, positive(4))
case("acosh", lax.acosh, positive(4) + 1)
for fn in (lax.clz, lax.population_count, lax.neg, lax.bitwise_not, lax.sign, lax.square):
    case(f"{fn.__name__}_int", fn, N)
case("not_bool", lax.bitwise_not, T)
for fn in (lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.atan2, lax.nextafter, lax.rem, lax.eq, lax.ne,
           lax.ge, lax.gt, lax.le, lax.lt):  # fmt: skip
    case(fn.__name__, fn, X, Y)
    if fn not in (lax.atan2, lax.nextafter):
        case(f"{fn.__name__}_int", fn, N, np.where(M == 0, 1, M).astype(np.int32))
for fn in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor):
    case(f"{fn.__name__}_int", fn, N, M)
    case(f"{fn.__name__}_bool", fn, T, bools(4))
for fn in (lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical, lax.mulhi):
    case(fn.__name__, fn, N, ints(4, low=0, high=8))
case("add_any", primitives.add_jaxvals_p.bind, X, Y)
case("add_scalar", lambda x: lax.add(x, 2.0), X)
case("max_uint", lax.max, ints(4, low=0, dtype=np.uint8), ints(4, low=0, dtype=np.uint8))
case("pow", lax.pow, positive(4), Y)
for y in (-1, 1, 2, 3):
    case(f"integer_pow_{y}", lambda x, y=y: primitives.integer_pow_p.bind(x, y=y), X)
case("integer_pow_3_int", lambda x: lax.integer_pow(x, 3), N)
for name in ("igamma", "igammac", "igamma_grad_a", "polygamma", "zeta"):
    case(name, getattr(primitives, f"{name}_p").bind, np.round(positive(4)) + 2, positive(4) + 2)
case("betainc", primitives.regularized_incomplete_beta_p.bind, positive(4), positive(4), np.clip(positive(4), 0.1, 0.9))
for name, fn in (("eq_to", primitives.eq_to_p), ("le_to", primitives.le_to_p), ("lt_to", primitives.lt_to_p)):
    case(name, fn.bind, X, Y)
case("complex", lax.complex, X, Y)
for fn in (lax.real, lax.imag, lax.conj, lax.neg, lax.exp, lax.log):
    case(f"{fn.__name__}_complex", fn, cplx(4))
case("select_n", lax.select_n, T, X, Y)
case("select_n_scalar", lax.select_n, np.bool_(True), X, Y)
case("select_n_three", lax.select_n, ints(6, low=0, high=3), ints(6), ints(6), ints(6))
case("clamp", lax.clamp, UNIT - 0.5, X, UNIT + 0.5)
case("clamp_scalars", lambda x: lax.clamp(-0.5, x, 0.5), X)
case("clamp_int", lambda x: lax.clamp(np.int32(-9), x, np.int32(9)), N)
case("copy", primitives.copy_p.bind, X)
case("layout_constraint", lambda x: with_layout_constraint(lax.neg(x), Layout((1, 0))), floats(3, 5))
case("name", lambda x: checkpoint_name(x, "x"), X)
case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), floats(7, dtype=np.float32))
case("threefry2x32", primitives.threefry2x32_p.bind, *(ints(4, low=0, dtype=np.uint32) for _ in range(4)))
case("threefry2x32_one_key", primitives.threefry2x32_p.bind, np.uint32(3), np.uint32(4),
     *(ints(4, low=0, dtype=np.uint32) for _ in range(2)))  # fmt: skip
case("bitcast", lambda x: lax.bitcast_convert_type(x, np.int64), X)
case("bitcast_narrow", lambda x: lax.bitcast_convert_type(x, np.int32), X)
case("bitcast_wide", lambda x: lax.bitcast_convert_type(x, np.int64), ints(3, 5, 2))
CONVERSIONS = [
    (np.float32, np.float64), (np.float64, np.float32), (np.float32, "bfloat16"), ("bfloat16", np.float32),
    ("float16", "bfloat16"), ("bfloat16", "float16"), (np.float32, "float8_e4m3fn"), (np.float64, np.int32),
    (np.float32, bool), (np.int32, np.float32), (np.int32, np.float64), (np.int8, np.int32), (np.int32, np.int8),
    (np.int32, np.uint32), (np.uint8, np.int32), (np.uint8, np.int8), (bool, np.int32), (bool, np.float32),
    (np.int32, bool), (np.float32, np.complex64), (np.float64, np.complex64), (np.complex64, np.complex128),
]  # fmt: skip
for old, new in CONVERSIONS:
    value = (ints(4, low=-99, high=99) if np.issubdtype(np.dtype(old), np.integer) else X * 9).astype(old)
    case(f"convert_{np.dtype(old).name}_to_{np.dtype(new).name}",
         lambda x, new=new: lax.convert_element_type(x, np.dtype(new)), value,
         primitive="convert_element_type")  # fmt: skip

X, Y, N, T = floats(3, 5), floats(3, 5), ints(3, 5), bools(3, 5)
for fn in (lax.add, lax.mul, lax.max):
    case(f"{fn.__name__}_2d", fn, X, Y)
case("select_n_2d", lax.select_n, T, X, Y)

# --- layout ---
A = floats(3, 4, 6)
case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (3, 2, 5), (0, 2)), X)
case("broadcast_in_dim_stretch", lambda x: lax.broadcast_in_dim(x, (4, 5), (0, 1)), floats(1, 5))
case("broadcast_in_dim_scalar", lambda x: lax.broadcast_in_dim(x, (3, 5), ()), np.int32(7))
for old, new in [((4, 6), (24,)), ((24,), (4, 6)), ((4, 6), (6, 4)), ((4, 6, 5), (24, 5)), ((5, 4, 6), (5, 24)),
                 ((1, 4, 6), (24,)), ((6, 4), (1, 6, 1, 4)), ((1, 1), (1,)), ((), (1, 1)), ((2, 3, 4), (6, 2, 2)),
                 ((3, 6), (6, 3)), ((0, 3), (3, 0))]:  # fmt: skip
    case(f"reshape_{old}_{new}", lambda x, new=new: primitives.reshape_p.bind(
        x, new_sizes=new, dimensions=None, sharding=None), floats(*old))  # fmt: skip
case("reshape_transposed", lambda x: lax.reshape(x, (24, 3), dimensions=(1, 2, 0)), A)
case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), A)
case("squeeze", lambda x: lax.squeeze(x, (1,)), floats(3, 1, 5))
case("expand_dims", lambda x: lax.expand_dims(x, (1,)), X)
case("rev", lambda x: lax.rev(x, (1,)), A)
case("tile", lambda x: primitives_by_name("tile").bind(x, reps=(2, 1)), X)
case("stack", lambda x, y: primitives_by_name("stack").bind(x, y, axis=1), X, Y)
case("unstack", lambda x: primitives_by_name("unstack").bind(x, axis=1), X)
for dtype in (np.int32, np.uint8, np.float32):
    case(f"iota_{np.dtype(dtype).name}", lambda dtype=dtype: lax.broadcasted_iota(dtype, (3, 5), 1))


def primitives_by_name(name: str) -> Any:
    """Primitives that `jax.extend` does not name, taken from a trace."""
    traces = {
        "tile": lambda: jax.make_jaxpr(lambda x: lax.tile(x, (2,)))(X[0]),
        "stack": lambda: jax.make_jaxpr(lambda x: jax.numpy.stack([x, x]))(X),
        "unstack": lambda: jax.make_jaxpr(lambda x: lax.unstack(x, 0))(X),
    }
    return traces[name]().eqns[-1].primitive


# --- slicing ---
case("slice", lambda x: lax.slice(x, (0, 1, 0), (3, 4, 6), (1, 2, 1)), A)
case("slice_strided", lambda x: lax.slice(x, (0, 0, 0), (3, 4, 6), (1, 1, 2)), A)
case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i, i), (3, 2, 6)), A, np.int32(1),
     primitive="dynamic_slice")  # fmt: skip
case("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i, i)), A, floats(3, 2, 6),
     np.int32(1), primitive="dynamic_update_slice")  # fmt: skip
case("concatenate", lambda x, y: lax.concatenate([x, y, x], 1), X, floats(3, 2))
case("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 2, 0), (0, 1, 1))), A, np.float64(2))
case("pad_inside", lambda x: lax.pad(x, 3.0, ((0, 0, 0), (1, -1, 1), (-2, 3, 2))), A)
case("slice_far", lambda x: lax.slice(x, (11, 0), (29, 2), (2, 1)), floats(31, 2))
case("slice_few", lambda x: lax.slice(x, (11, 0), (16, 2), (2, 1)), floats(31, 2))
case("slice_few_bool", lambda x: lax.slice(x, (30,), (31,)), bools(31))
case("concatenate_far", lambda x, y: lax.concatenate([x, y, x], 0), floats(7), floats(1))
case("concatenate_few", lambda x, y: lax.concatenate([y, x, y, x], 0), floats(9), floats(2))
case("dynamic_update_slice_wide", lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)), floats(5, 3), floats(3, 1),
     np.int64(1), primitive="dynamic_update_slice")  # fmt: skip
case("dynamic_slice_bool", lambda x, i: lax.dynamic_slice(x, (i,), (3,)), bools(7), np.int32(3),
     primitive="dynamic_slice")  # fmt: skip
case("dynamic_slice_clamped", lambda x, i: lax.dynamic_slice(x, (i, -i), (2, 3)), X, np.int32(2),
     primitive="dynamic_slice")  # fmt: skip
case("dynamic_update_slice_clamped", lambda x, y, i: lax.dynamic_update_slice(x, y, (-i, i)), floats(5, 7),
     floats(3, 4), np.int32(6), primitive="dynamic_update_slice")  # fmt: skip
case("pad_negative", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, 0, 0))), X)

# --- contractions ---
case("dot", lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))), floats(3, 5), floats(5, 4))
case("dot_batch", lambda a, b: lax.dot_general(a, b, (((3, 1), (1, 2)), ((0,), (3,)))), floats(3, 2, 4, 5),
     floats(2, 5, 2, 3))  # fmt: skip
case("dot_vector", lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ()))), floats(5), floats(5))
case("dot_int8", lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=np.int32),
     ints(3, 5, dtype=np.int8), ints(5, 4, dtype=np.int8))  # fmt: skip
case("dot_bf16", lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=np.float32),
     floats(3, 5, dtype="bfloat16"), floats(5, 4, dtype="bfloat16"))  # fmt: skip
case("dot_empty", lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))), floats(3, 0), floats(0, 4))


case("scaled_dot", lambda a, b, s, t: lax.scaled_dot(
    a, b, lhs_scale=s, rhs_scale=t, dimension_numbers=(((2,), (1,)), ((0,), (0,))), preferred_element_type=np.float32),
     floats(2, 3, 12, dtype="bfloat16"), floats(2, 12, 5, dtype="bfloat16"), positive(2, 3, 6).astype("bfloat16"),
     positive(2, 3, 5).astype("bfloat16"), primitive="scaled_dot")  # fmt: skip
RAGGED = lax.RaggedDotDimensionNumbers


def ragged(name: str, numbers: Any, x: Any, w: Any, sizes: Any) -> None:
    case(f"ragged_{name}", lambda x, w, n: lax.ragged_dot_general(x, w, n, numbers), x, w, np.asarray(sizes),
         primitive="ragged_dot_general")  # fmt: skip


PLAIN_RAGGED = RAGGED((((1,), (1,)), ((), ())), (0,), (0,))
PER_BATCH = RAGGED((((3,), (2,)), ((0,), (1,))), (2,), (0,))
SIZES = {"rows": (2, 0, 5, 4), "left_over": (3, 1, 0, 4), "too_many": (0, 0, 8, 7), "one": (0, 0, 0, 11)}
for name, sizes in SIZES.items():
    ragged(name, PLAIN_RAGGED, floats(11, 3), floats(4, 3, 2), np.asarray(sizes, np.int32))
    ragged(f"{name}_summed", RAGGED((((0,), (0,)), ((), ())), (0,), ()), floats(11, 3), floats(11, 2), sizes)
ragged("uint", PLAIN_RAGGED, floats(11, 3), floats(4, 3, 2), np.asarray((2, 0, 5, 4), np.uint32))
ragged("narrow", PLAIN_RAGGED, floats(11, 3), floats(4, 3, 2), np.asarray((2, 0, 5, 4), np.int8))
INNER = RAGGED((((0,), (1,)), ((), ())), (2,), (0,))
ragged("inner", INNER, floats(3, 2, 7), floats(4, 3, 2), ints(2, 4, low=0, high=3))
ragged("inner_alike", INNER, floats(3, 2, 7), floats(4, 3, 2), (1, 0, 4, 2))
ragged("int", PLAIN_RAGGED, ints(11, 3), ints(4, 3, 2), (2, 3, 5, 1))
ragged("batched", PER_BATCH, floats(3, 2, 7, 3), floats(4, 3, 3, 2), (2, 0, 1, 4))
ragged("batched_sizes", PER_BATCH, floats(3, 2, 5, 3), floats(3, 3, 3, 2), ints(3, 2, 3, low=0, high=3))
ragged("summed_sizes", RAGGED((((1, 2), (0, 2)), ((0,), (1,))), (2,), ()), floats(2, 3, 5, 2), floats(3, 2, 5, 4),
       ints(2, 3, 3, low=0, high=3))  # fmt: skip
ragged("of_batch", RAGGED((((2,), (1,)), ((0,), (0,))), (0,), ()), floats(3, 4, 5), floats(3, 5, 2), (1, 2))


def conv(x: Any, k: Any, spec: tuple[str, str, str] = ("NHC", "HIO", "NHC"), **kwargs: Any) -> Any:
    return lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=spec, **kwargs)


case("conv", conv, floats(3, 4, 5), floats(3, 5, 4))
case("conv_2d", lambda x, k: lax.conv_general_dilated(x, k, (2, 1), ((1, 0), (0, 1)), (1, 2), (2, 1)),
     floats(2, 3, 5, 4), floats(3, 3, 2, 2))  # fmt: skip
case("conv_depthwise", lambda x, k: conv(x, k, feature_group_count=6), floats(3, 4, 6), floats(3, 1, 12))
case("conv_grouped", lambda x, k: conv(x, k, feature_group_count=6), floats(2, 4, 12), floats(3, 2, 6))
case("conv_batch_grouped", lambda x, k: conv(x, k, batch_group_count=6), floats(12, 4, 3), floats(3, 3, 12))


def conv_with(
    strides: Any, padding: Any, image: Any = None, kernel: Any = None, spec: Any = ("NCH", "OIH", "NCH"), **kwargs: Any
) -> Callable[[Any, Any], Any]:
    return lambda x, k: lax.conv_general_dilated(
        x, k, strides, padding, image, kernel, lax.conv_dimension_numbers(x.shape, k.shape, spec), **kwargs
    )


IMAGE = ("NHWC", "HWIO", "NHWC")
case("conv_point", conv_with((1,), ((0, 0),)), floats(2, 3, 5), floats(2, 3, 1))
case("conv_point_strided", conv_with((2,), ((0, 0),)), floats(2, 3, 7), floats(2, 3, 1))
case("conv_image", conv_with((2, 1), "SAME", spec=IMAGE), floats(1, 7, 6, 2), floats(3, 3, 2, 2))
case("conv_volume", conv_with((1, 1, 2), ((1, 1), (0, 0), (0, 1)), spec=("NCDHW", "OIDHW", "NDHWC")),
     floats(1, 2, 4, 3, 5), floats(2, 2, 3, 1, 2))  # fmt: skip
case("conv_cropped", conv_with((2,), ((-1, -2),), (3,), (2,)), floats(1, 2, 6), floats(2, 2, 2))
case("conv_transposed", conv_with((1,), ((2, 2),), (2,)), floats(1, 2, 6), floats(2, 2, 3))
case("conv_transposed_in_phase", conv_with((1,), ((2, 1),), (2,)), floats(1, 2, 6), floats(2, 2, 3))
case("conv_of_weights", conv_with((1, 1), ((1, 1), (0, 0)), (1, 1), (2, 1), ("CHWN", "IHWO", "HWNC")),
     floats(2, 7, 5, 3), floats(2, 4, 5, 3))  # fmt: skip
case("conv_of_weights_strided", conv_with((2,), ((1, 2),), (2,), (1,)), floats(2, 3, 4), floats(2, 3, 5))
case("conv_of_weights_grouped", conv_with((1,), ((1, 1),), batch_group_count=2), floats(4, 3, 6), floats(4, 3, 6))
case("conv_of_weights_depthwise", conv_with((1,), ((1, 1),), feature_group_count=3), floats(2, 3, 6), floats(6, 1, 6))
case("conv_int8", conv_with((1,), ((1, 1),)), ints(2, 3, 5, dtype=np.int8), ints(2, 3, 3, dtype=np.int8))
case("conv_bf16", conv_with((1,), ((1, 1),)), floats(2, 3, 5, dtype="bfloat16"), floats(2, 3, 3, dtype="bfloat16"))
case("conv_bf16_of_weights", conv_with((1,), ((1, 1),), preferred_element_type=np.float32),
     floats(2, 3, 5, dtype="bfloat16"), floats(2, 3, 5, dtype="bfloat16"))  # fmt: skip

# --- reductions ---
for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
    for kind, value in (("float", A), ("int", ints(3, 4, 5))):
        case(f"{name}_{kind}", lambda x, name=name: getattr(lax, name)(x, (0, 2)), value)
    case(f"{name}_all_int", lambda x, name=name: getattr(lax, name)(x, (0, 1)), ints(5, 4, dtype=np.uint8))
case("reduce_prod_bf16", lambda x: lax.reduce_prod(x, (1,)), floats(3, 5, dtype="bfloat16"))
case("reduce_prod_complex", lambda x: lax.reduce_prod(x, (1,)), cplx(3, 5))
case("reduce_prod_odd", lambda x: lax.reduce_prod(x, (0,)), np.array([[1, 2.0, np.inf, 0, np.nan]] * 5).T)
case("reduce_sum_all", lambda x: lax.reduce_sum(x, (0, 1)), X)
case("reduce_sum_bf16", lambda x: lax.reduce_sum(x, (1,)), floats(3, 5, dtype="bfloat16"))
case("reduce_max_bool", lambda x: lax.reduce_max(x, (1,)), T)
for name in ("reduce_and", "reduce_or", "reduce_xor"):
    case(f"{name}_bool", lambda x, name=name: getattr(lax, name)(x, (1,)), bools(2, 7))
    case(f"{name}_int", lambda x, name=name: getattr(lax, name)(x, (1,)), N)
    case(f"{name}_uint", lambda x, name=name: getattr(lax, name)(x, (0, 1)), ints(5, 3, low=200, high=256,
                                                                                  dtype=np.uint8))  # fmt: skip
case("reduce", lambda x, n: lax.reduce(
    (x, n), (np.float64(0), np.int32(1)), lambda a, b: (a[0] + b[0] * b[0], a[1] * b[1]), (1,)), X, N)  # fmt: skip
for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    case(name, lambda x, name=name: getattr(lax, name)(x, axis=1, reverse=True), X)
    case(f"{name}_long", lambda x, name=name: getattr(lax, name)(x, axis=0), floats(13, 2))
    case(f"{name}_bf16", lambda x, name=name: getattr(lax, name)(x, axis=0), floats(9, dtype="bfloat16"))
    odd = np.array([-np.inf, 1, -np.inf, 2, np.inf, 3, np.nan, 4, -np.inf])
    for i in (7, 9):
        for back in (False, True):
            case(
                f"{name}_odd_{i}_{back}",
                lambda x, name=name, back=back: getattr(lax, name)(x, axis=0, reverse=back),
                odd[i - 7 : i],
            )
    if name != "cumlogsumexp":
        case(f"{name}_int8", lambda x, name=name: getattr(lax, name)(x, axis=0), ints(7, dtype=np.int8))
        case(f"{name}_uint8", lambda x, name=name: getattr(lax, name)(x, axis=0, reverse=True),
             ints(7, low=200, high=256, dtype=np.uint8))  # fmt: skip
for name in ("cumsum", "cumprod", "cumlogsumexp"):
    case(f"{name}_complex", lambda x, name=name: getattr(lax, name)(x, axis=0), cplx(7))
case("cumlogsumexp_lowest", lambda x: lax.cumlogsumexp(x, axis=0), np.array([-np.inf] * 4 + [1.0, -np.inf, 2.0]))
case("cumsum_empty", lambda x: lax.cumsum(x, axis=0), floats(0, 3))
case("cummax_complex", lambda x: lax.cummax(x, axis=0), cplx(7))
case("argmax", lambda x: lax.argmax(x, 1, np.int32), X)
case("argmin", lambda x: lax.argmin(x, 0, np.int32), X)
LOW = -np.inf
ODD_ROWS = np.array([[3, 1, LOW, 0, 0.0, 7, LOW], [3, np.nan, LOW, 0, -0.0, 5, LOW], [1, 5, LOW, 0, 0, 7, 1],
                     [9, np.nan, LOW, -1, 0, 7, LOW], [9, np.inf, LOW, 0, -0.0, 7, 1]])  # fmt: skip
RANKED: dict[str, np.ndarray] = {
    "ties": ints(9, 4, low=0, high=3), "odd": ODD_ROWS, "odd_f32": -ODD_ROWS.astype(np.float32),
    "bf16": floats(9, 2, dtype="bfloat16"), "uint": ints(9, 3, low=0, high=3, dtype=np.uint8),
    "least": np.full((5, 2), -128, np.int8), "minus_nan": np.copysign(ODD_ROWS, -1), "tall": floats(17, 2),
}  # fmt: skip
for name, value in {**RANKED, "bool": bools(9, 4)}.items():
    for fn in (lax.argmax, lax.argmin):
        case(f"{fn.__name__}_{name}", lambda x, fn=fn: fn(x, 0, np.int64), value)
for k, names in ((1, ("ties",)), (2, RANKED), (4, ("ties", "odd", "minus_nan", "least"))):
    for name in names:
        case(f"top_{k}_{name}", lambda x, k=k: lax.top_k(x, k, axis=0), RANKED[name])
case("argmax_uint8", lambda x: lax.argmax(x, 0, np.uint8), floats(256))
case("argmax_wraps", lambda x: lax.argmax(x, 0, np.uint8), floats(300))
case("top_all", lambda x: lax.top_k(x, 7), floats(2, 7))
case("approx_top_k", lambda x: lax.approx_max_k(x, 2), floats(3, 5, dtype=np.float32))
case("approx_top_k_loose", lambda x: lax.approx_min_k(x, 2, 0, aggregate_to_topk=False), floats(9, 3))
case("top_none", lambda x: lax.top_k(x, 0), floats(2, 7))
case("sort", lambda x, n: lax.sort((n, x), dimension=1, num_keys=1), X, N)
case("top_k", lambda x: lax.top_k(x, 2), X)

# --- windows ---
W = floats(3, 6, 4, 5)
WINDOW: dict[str, Any] = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 1, 1)}
PLAIN = ((0, 0),) * 4
PADDED = ((0, 0), (0, 0), (1, 0), (0, 0))
for name, fn, start in (("sum", lax.add, 0.0), ("max", lax.max, -np.inf), ("min", lax.min, np.inf)):
    case(f"reduce_window_{name}", lambda x, fn=fn, start=start: lax.reduce_window(
        x, start, fn, padding=PADDED, **WINDOW), W, primitive=f"reduce_window_{name}")  # fmt: skip
case("reduce_window", lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b, padding=PADDED, **WINDOW), W)
case("reduce_window_two", lambda x: lax.reduce_window(
    (x, x), (1.0, 0.0), lambda a, b: (a[0] * b[0], a[1] + b[1]), padding="VALID", **WINDOW), W)  # fmt: skip
DILATED: dict[str, Any] = {
    "window_dimensions": (2, 3), "window_strides": (1, 2), "padding": ((1, 0), (2, 1)), "base_dilation": (1, 3),
    "window_dilation": (3, 2),
}  # fmt: skip
TIES = np.round(floats(6, 5))
for name, fn, start in (("sum", lax.add, 0.0), ("max", lax.max, -np.inf), ("min", lax.min, np.inf)):
    case(f"reduce_window_{name}_dilated", lambda x, fn=fn, start=start: lax.reduce_window(x, start, fn, **DILATED),
         TIES, primitive=f"reduce_window_{name}")  # fmt: skip
case("reduce_window_max_int", lambda x: lax.reduce_window(x, np.int32(-(2**31)), lax.max, **DILATED), ints(6, 5))
case("reduce_window_running", lambda x: lax.reduce_window(
    x, 0.0, lax.add, (7,), (1,), ((6, 0),)), floats(7), primitive="reduce_window_sum")  # fmt: skip
SELECT: dict[str, Any] = {**WINDOW, "padding": PLAIN, "select_prim": primitives.ge_p}
case("select_and_scatter_add", lambda s, x: primitives.select_and_scatter_add_p.bind(s, x, **SELECT),
     floats(3, 3, 3, 5), W)  # fmt: skip
case("select_and_gather_add", lambda t, x: primitives.select_and_gather_add_p.bind(
    t, x, **SELECT, base_dilation=(1,) * 4, window_dilation=(1,) * 4), floats(*W.shape), W)  # fmt: skip
case("select_and_gather_add_padded", lambda t, x: primitives.select_and_gather_add_p.bind(
    t, x, **DILATED, select_prim=primitives.le_p), floats(6, 5), floats(6, 5))  # fmt: skip
case("select_and_gather_add_spread", lambda t, x: primitives.select_and_gather_add_p.bind(
    t, x, **{**DILATED, "padding": ((0, 0),) * 2, "base_dilation": (1, 1)}, select_prim=primitives.le_p),
    floats(6, 5), TIES)  # fmt: skip
for kind, (size, stride, pads, outs) in {
    "overlapping": ((3, 2), (2, 1), ((1, 1), (0, 1)), (3, 5)), "gaps": ((2, 1), (3, 2), ((0, 0), (0, 0)), (2, 3)),
    "in_phase": ((3, 1), (3, 1), ((0, 0), (0, 0)), (2, 5)),
}.items():  # fmt: skip
    for prim in (primitives.ge_p, primitives.le_p):
        params = {"select_prim": prim, "window_dimensions": size, "window_strides": stride, "padding": pads}
        case(f"select_and_scatter_add_{kind}_{prim.name}", lambda s, x, p=params: (
            primitives.select_and_scatter_add_p.bind(s, x, **p)), floats(*outs), TIES)  # fmt: skip

# --- linear algebra ---
ROOT = floats(3, 4, 4)
SPD = np.eye(4) * 9 + ROOT @ ROOT.swapaxes(1, 2)
case("cholesky", primitives.cholesky_p.bind, SPD)
case("eigh", lambda a: lax.linalg.eigh(a, symmetrize_input=False), SPD)
case("eig", lax.linalg.eig, SPD)
case("hessenberg", lax.linalg.hessenberg, SPD, primitive="hessenberg")
case("schur", lax.linalg.schur, SPD)
case("lu", lax.linalg.lu, SPD, primitive="lu")
case("lu_pivots", lambda p: lax.linalg.lu_pivots_to_permutation(p, 4), np.array([[1, 1, 3, 3]] * 3, np.int32))
case("qr", lax.linalg.qr, SPD, primitive="qr")
case("svd", lax.linalg.svd, SPD, primitive="svd")
case("householder_product", lax.linalg.householder_product, floats(3, 4, 2), floats(3, 2))
case("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), SPD,
     floats(3, 4, 2), primitive="triangular_solve")  # fmt: skip
case("triangular_solve_right", lambda a, b: lax.linalg.triangular_solve(a, b, transpose_a=True), SPD[0],
     floats(5, 4), primitive="triangular_solve")  # fmt: skip
for lower in (False, True):
    case(f"tridiagonal_{lower}", lambda a, lower=lower: lax.linalg.tridiagonal(a, lower=lower), SPD,
         primitive="tridiagonal")  # fmt: skip
case("tridiagonal_solve", lax.linalg.tridiagonal_solve, floats(3, 4), positive(3, 4) + 5, floats(3, 4), floats(3, 4, 5),
     primitive="tridiagonal_solve")  # fmt: skip
case("symmetric_product", lambda a, c: lax.linalg.symmetric_product(a, c, alpha=2.0, beta=3.0), floats(2, 3, 5),
     np.eye(3) + ROOT[:2, :3, :3] + ROOT[:2, :3, :3].swapaxes(1, 2), primitive="symmetric_product")  # fmt: skip


def raw_qr(a: Any) -> Any:
    with jax.disable_jit():
        return jax.numpy.linalg.qr(a, mode="raw")


case("geqrf", raw_qr, SPD, primitive="geqrf")
for left in (False, True):
    case(f"ormqr_{left}", lambda a, t, c, left=left: lax.linalg.ormqr(a, t, c, left=left), floats(2, 4, 3),
         floats(2, 3), floats(2, 4, 4), primitive="ormqr")  # fmt: skip
case("fft", lambda x: primitives.fft_p.bind(x, fft_type=lax.FftType.FFT, fft_lengths=(4,)), cplx(3, 2, 4))
case("irfft", lambda x: primitives.fft_p.bind(x, fft_type=lax.FftType.IRFFT, fft_lengths=(2, 4)), cplx(3, 2, 3))

# --- gather and scatter ---
MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)
ROWS = GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
INTO_ROWS = ScatterDimensionNumbers(
    update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
WILD = ints(2, 3, 1, low=-3, high=9)  # for a table of 5 rows: in and out of bounds
TAME = ints(2, 3, 1, low=0, high=5)


def gather(name: str, x: Any, i: Any, numbers: Any, sizes: Any, mode: Any, fill: Any = None) -> None:
    case(name, lambda x, i: lax.gather(x, i, numbers, sizes, mode=mode, fill_value=fill), x, i)


def scatter(name: str, fn: Any, x: Any, i: Any, u: Any, numbers: Any, mode: Any, unique: bool = False) -> None:
    case(name, lambda x, i, u: fn(x, i, u, numbers, mode=mode, unique_indices=unique), x, i, u)


SCATTERS = {"": lax.scatter, "_add": lax.scatter_add, "_sub": lax.scatter_sub, "_mul": lax.scatter_mul,
            "_max": lax.scatter_max, "_min": lax.scatter_min}  # fmt: skip
TABLE = floats(5, 4)
for mode in MODES:
    where = mode.name.lower()
    asked = TAME if mode is GatherScatterMode.PROMISE_IN_BOUNDS else WILD
    gather(f"gather_{where}", TABLE, asked, ROWS, (1, 4), mode)
    gather(f"gather_int_{where}", ints(5, 4), asked, ROWS, (1, 4), mode, 7 if where == "fill_or_drop" else None)
    for suffix, fn in SCATTERS.items():
        scatter(f"scatter{suffix}_{where}", fn, TABLE, asked, floats(2, 3, 4), INTO_ROWS, mode)
gather("gather_kept", TABLE, WILD.astype(np.int8), GatherDimensionNumbers((1, 3), (), (0,)), (1, 4), MODES[1])
gather("gather_partial_slice", TABLE, WILD, GatherDimensionNumbers((1, 3), (), (0,)), (2, 4), MODES[0])
BOTH = GatherDimensionNumbers((1, 3), (), (1, 0))
for mode in MODES:
    where = mode.name.lower()
    asked = ints(4, 2, 2, low=0, high=4) if where == "promise_in_bounds" else ints(4, 2, 2, low=-3, high=9)
    gather(f"gather_windows_{where}", floats(7, 6), asked, BOTH, (3, 2), mode)
    gather(f"gather_windows_bool_{where}", bools(7, 6), asked, BOTH, (3, 1), mode)
    for suffix, fn in SCATTERS.items():
        scatter(f"scatter{suffix}_windows_{where}", fn, floats(7, 6), asked, floats(4, 3, 2, 2),
                ScatterDimensionNumbers((1, 3), (), (1, 0)), mode)  # fmt: skip
gather("gather_windows_filled", ints(7, 6), ints(4, 2, 2, low=-1, high=7), BOTH, (5, 4), MODES[1], 9)
gather("gather_windows_batched", A, ints(3, 2, 1, low=-1, high=7), GatherDimensionNumbers((1, 3), (), (2,), (0,), (0,)),
       (1, 4, 5), MODES[1])  # fmt: skip
gather("gather_window_alone", floats(9), ints(1, low=2, high=3), GatherDimensionNumbers((0,), (), (0,)), (5,), MODES[2])
scatter("scatter_window_alone", lax.scatter, floats(9), ints(1, low=2, high=3), floats(5),
        ScatterDimensionNumbers((0,), (), (0,)), MODES[1])  # fmt: skip
gather("gather_whole_indexed", TABLE, ints(6, 2, low=-1, high=5), GatherDimensionNumbers((1,), (0,), (1, 0)), (1, 4),
       MODES[1])  # fmt: skip
gather("gather_two", A, ints(7, 2, low=-1, high=6), GatherDimensionNumbers((1,), (0, 2), (2, 0)), (1, 4, 1), MODES[1])
gather("gather_two_clip", A, ints(7, 2, low=-1, high=6), GatherDimensionNumbers((1,), (0, 2), (2, 0)), (1, 4, 1),
       MODES[0])  # fmt: skip
gather("gather_unsigned", TABLE, np.array([[3], [2**32 - 1], [9]], np.uint32), GatherDimensionNumbers((1,), (0,), (0,)),
       (1, 4), MODES[0])  # fmt: skip
gather("gather_batched", A, ints(3, 2, 1, low=-1, high=7), GatherDimensionNumbers((2,), (2,), (2,), (0,), (0,)),
       (1, 4, 1), MODES[1])  # fmt: skip
gather("gather_bool", bools(5, 4), WILD, ROWS, (1, 4), MODES[1])
gather("gather_one_row", floats(1, 4), np.zeros((2, 3, 1), np.int32), ROWS, (1, 4), MODES[0])
gather("gather_scalar", floats(5), ints(1, low=0, high=5), GatherDimensionNumbers((), (0,), (0,)), (1,), MODES[2])
gather("gather_nothing", floats(5, 4), ints(0, 3, 1), ROWS, (1, 4), MODES[1])
case("gather_sorted", lambda x, i: lax.gather(x, i, ROWS, (1, 4), indices_are_sorted=True, unique_indices=True),
     TABLE, np.array([[[0], [1], [2]], [[3], [4], [4]]]))  # fmt: skip
scatter("scatter_add_int", lax.scatter_add, ints(5, 4), WILD, ints(2, 3, 4), INTO_ROWS, MODES[1])
scatter("scatter_max_int", lax.scatter_max, ints(5, 4), WILD, ints(2, 3, 4), INTO_ROWS, MODES[1])
scatter("scatter_unique", lax.scatter, TABLE, np.array([[[0], [4]], [[1], [7]]]), floats(2, 2, 4), INTO_ROWS, MODES[1],
        unique=True)  # fmt: skip
scatter("scatter_add_batched", lax.scatter_add, A, ints(3, 2, 1, low=-1, high=7), floats(3, 2, 4),
        ScatterDimensionNumbers((2,), (2,), (2,), (0,), (0,)), MODES[0])  # fmt: skip
scatter("scatter_add_two", lax.scatter_add, A, ints(7, 2, low=-1, high=6), floats(7, 4),
        ScatterDimensionNumbers((1,), (0, 2), (2, 0)), MODES[1])  # fmt: skip
scatter("scatter_add_two_clip", lax.scatter_add, A, ints(7, 2, low=-1, high=6), floats(7, 4),
        ScatterDimensionNumbers((1,), (0, 2), (2, 0)), MODES[0])  # fmt: skip
scatter("scatter_add_window", lax.scatter_add, TABLE, WILD, floats(2, 3, 2, 4),
        ScatterDimensionNumbers((2, 3), (), (0,)), MODES[0])  # fmt: skip
scatter("scatter_add_kept", lax.scatter_add, TABLE, WILD, floats(2, 3, 1, 4), ScatterDimensionNumbers((2, 3), (), (0,)),
        MODES[0])  # fmt: skip
case("scatter_apply", lambda x, i: lax.scatter_apply(x, i, lambda v: v * 2, INTO_ROWS, update_shape=(2, 2, 4),
                                                     unique_indices=True), TABLE, np.array([[[0], [4]], [[1], [7]]]),
     primitive="scatter")  # fmt: skip


# --- random numbers ---
def keyed(fn: Callable[..., Any], name: str = "threefry2x32", shape: tuple[int, ...] = (3,)) -> tuple[Any, Any]:
    """The function on the words of keys in place of the keys, and such words."""
    words = ints(*shape, 2 if name == "threefry2x32" else 4, low=0, dtype=np.uint32)
    return lambda words, *rest: fn(jax.random.wrap_key_data(words, impl=name), *rest), words


for bits in (8, 16, 32, 64):
    case(f"random_bits_{bits}", *keyed(lambda k, n=bits: jax.random.bits(k, (3, 5, 2), f"uint{n}"), shape=()))
for name in ("threefry2x32", "rbg", "unsafe_rbg", "threefry4x32"):
    case(f"random_bits_of_{name}", *keyed(jax.vmap(lambda k: jax.random.bits(k, (2, 5))), name))
    case(f"random_split_{name}", *keyed(jax.vmap(lambda k: jax.random.split(k, (5, 2))), name))
    case(f"random_fold_in_{name}", *keyed(lambda k: jax.vmap(jax.random.fold_in)(k, np.arange(3)), name),
         primitive="random_fold_in")  # fmt: skip
for name in ("threefry2x32", "rbg"):
    case(f"random_gamma_{name}", *keyed(partial(primitives.random_gamma_p.bind, log_space=False), name, (2,)),
         positive(2, 3) * 3)  # fmt: skip
case("random_gamma_one_key", *keyed(partial(primitives.random_gamma_p.bind, log_space=True), shape=()),
     positive(2, 3) / 3)  # fmt: skip
case("random_fold_in_one", *keyed(lambda k: jax.vmap(jax.random.fold_in, (0, None))(k, 7)), primitive="random_fold_in")
case("random_seed", jax.vmap(jax.random.key), ints(5), primitive="random_seed")
case("random_clone", *keyed(jax.random.clone), primitive="random_clone")
case("random_wrap", jax.random.wrap_key_data, ints(3, 2, low=0, dtype=np.uint32), primitive="random_wrap")
case("random_unwrap", *keyed(jax.random.key_data), primitive="random_unwrap")
case("iota_2x32_shape", lambda w: jax.extend.random.threefry_prng_impl.random_bits(w, 32, (3, 5)),
     ints(2, low=0, dtype=np.uint32), primitive="iota_2x32_shape")  # fmt: skip

# --- a user's own ---
own_matmul = shardc.signature("b d, d f -> b f", linear=(0, 1))(lambda x, w: x @ w)
own_max = shardc.signature("b d -> b", reduce="max")(lambda x: x.max(1))
case("own_matmul", own_matmul, floats(4, 6), floats(6, 5), primitive="user_operation")
case("own_max", own_max, floats(4, 6), primitive="user_operation")

# --- of some releases; they stand last, so that the numbers of the others are those of every release ---
case("empty", lambda: lax.empty((3, 5), np.float32))
if hasattr(lax, "log2"):
    case("log2", lax.log2, positive(4))
if hasattr(lax, "one_minus_square"):
    case("one_minus_square", lax.one_minus_square, floats(4))
if hasattr(lax, "polynomial"):
    case("polynomial", lambda x, *a: lax.polynomial(x, a), floats(4, 6), *(floats(4, 6) for _ in range(3)))
    case("polynomial_scalars", lambda x: lax.polynomial(x, (1.0, 5.0, 2.0)), floats(4, 6))
    case("polynomial_broadcast", lambda x, *a: lax.polynomial(x, a), floats(4, 6), floats(1, 6), floats(4, 1),
         floats(4, 6))  # fmt: skip
    many = [float(a) for a in floats(12)]
    case("polynomial_scanned", lambda x: lax.polynomial(x, many), floats(4))

# --- joined ranges (last: the numbers of a case depend on the cases before it) ---
case("join_rotation", lambda x: join_ranges_p.bind(x, dim=0, size=7, ranges=((0, 5, 7), (2, 0, 5))), floats(7, 2))
case(
    "join_edges", lambda x: join_ranges_p.bind(x, dim=1, size=7, ranges=((0, 0, 1), (1, 0, 5), (6, 4, 5))), floats(2, 5)
)
case("join_around", lambda x: join_ranges_p.bind(x, dim=0, size=11, ranges=((0, 6, 8), (2, 0, 8), (10, 0, 1))), ints(8))
case("join_few", lambda x: join_ranges_p.bind(x, dim=0, size=9, ranges=((3, 8, 9), (7, 1, 2))), floats(9))
case("join_inner", lambda x: join_ranges_p.bind(x, dim=0, size=8, ranges=((1, 1, 6),)), bools(8))
case("join_twice", lambda x: join_ranges_p.bind(x, dim=0, size=8, ranges=((0, 0, 4), (4, 0, 4))), floats(8))

for rows, more in ((3, 0), (7, 2)):  # a layer, and a gradient of weights
    x, k = floats(2, 3, 7, 5), floats(4, 3, rows, 3)
    conv_2d = jax.make_jaxpr(partial(lax.conv_general_dilated, window_strides=(1, 1), padding=((0, more), (1, 1))))
    edges = {"joined": ((9, ((0, 0, 1), (1, 0, 7), (8, 6, 7))), (8, ((0, 1, 5), (4, 1, 5))))}
    case(f"conv_of_ranges_{rows}", partial(conv_of_ranges_p.bind, **conv_2d(x, k).eqns[0].params, **edges), x, k)


# --- cuDNN's attention ---
def attention(q: Any, k: Any, v: Any, bias: Any = None, **options: Any) -> Any:
    with attention_on_cpu.traced():
        return jax.nn.dot_product_attention(q, k, v, bias, implementation="cudnn", **options)


def attention_gradients(*args: Any, **options: Any) -> Any:
    return jax.grad(lambda *x: attention(*x, **options).astype(np.float32).sum(), tuple(range(len(args))))(*args)


def heads(queries: int, keys: int, shared: int = 1) -> tuple[np.ndarray, ...]:
    rows = (2, queries, 4, 8), (2, keys, 4 // shared, 8), (2, keys, 4 // shared, 8)
    return tuple(floats(*shape, dtype=np.float16) for shape in rows)


def attention_alone(*args: Any) -> Any:
    """Without derivatives: their rules stand around the operation."""
    (call,) = (e for e in jax.make_jaxpr(attention)(*args).eqns if e.primitive.name == "custom_vjp_call")
    empty = [np.zeros(v.aval.shape, v.aval.dtype) for v in call.invars[3:]]
    return jax.extend.core.jaxpr_as_fun(call.params["call_jaxpr"])(*args, *empty)


LENGTHS = {"query_seq_lengths": np.int32([3, 6]), "key_value_seq_lengths": np.int32([4, 2])}
for name, args, options in (
    ("whole", heads(12, 8), {}),
    ("causal", heads(6, 6), {"is_causal": True}),
    ("grouped", heads(4, 12, 2), {}),
    ("one_head_of_keys", heads(4, 4, 4), {}),
    ("window", heads(6, 6), {"is_causal": True, "local_window_size": (2, 0)}),
    ("lengths", heads(6, 4), LENGTHS),
    ("bias", (*heads(6, 4), floats(1, 4, 6, 4, dtype=np.float16)), {}),
    ("bias_of_heads", (*heads(6, 4), floats(2, 1, 6, 4, dtype=np.float16)), {}),
):
    case(f"attention_{name}", partial(attention_gradients, **options), *args,
         primitive="dot_product_attention_fwd_wrapper")  # fmt: skip
    case(f"attention_gradients_{name}", partial(attention_gradients, **options), *args,
         primitive="dot_product_attention_bwd_wrapper")  # fmt: skip
case("attention_alone", attention_alone, *heads(6, 4), primitive="dot_product_attention_fwd_wrapper")


# --- operations in one order ---
def in_order(fn: Any, *args: Any) -> Any:
    eqn = jax.make_jaxpr(fn)(*args).eqns[-1]
    return in_order_p.bind(*args, of=eqn.primitive, grain=4, **eqn.params)


for name, fn, args in (
    ("division", lax.div, (floats(4, 6), positive(4, 6))),
    ("sum", lambda x: x.sum((0, 2)), (floats(6, 4, 3),)),
    ("product", lax.dot, (floats(4, 12), floats(12, 2))),
    ("running_sum", lambda x: lax.cumsum(x, 1), (floats(4, 6),)),
):
    case(f"in_order_{name}", partial(in_order, fn), *args)
