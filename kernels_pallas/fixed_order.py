"""Schedule-invariant programs, and arithmetic whose order and rounding they fix; others compute it as XLA likes best.

In a schedule-invariant program a token's result has the same bits whatever the number of rows, tiles or steps in a
call, its place among them, and where its sequence was cut. Sums run in C++, in an order that is fixed for each row
(`native/product.h`), as do functions such as exp, or on TPU and GPU as kernels (`fixed_blocks`); XLA computes only
elementwise functions and maxima of integers. Recurrences run token by token in prefill as in decode. Weights and
activations are float32 or bfloat16, sums and states float32. An engine with `schedule_invariant` names the
implementations `NAME` of all operations, and compiles with `COMPILER_OPTIONS`.
"""

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from kernels_pallas import dispatch, fixed_blocks, native

NAME, INTERPRETED = "invariant", "invariant_interpreted"
"""Of the implementations that fix it: a choice of one of them makes a program schedule-invariant. The second one runs
the kernels of TPU and GPU in Pallas' interpreter, on any platform."""
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""Otherwise a program may leave out a rounding to bfloat16 that another one does."""
F32 = jnp.float32
FEW_TOKENS = 8
"""Of a router: for more of them, sums read its weight too often."""
_LEAST_OUTPUTS = 4
"""With fewer, the C++ product copies the weight."""
_MOST_SUMMED = 8192
"""Numbers of a row that a kernel adds up: a TPU's fast memory holds 64 rows of them, but not of a vocabulary."""

_always: contextvars.ContextVar[str | None] = contextvars.ContextVar("fixed_order", default=None)


def _name() -> Any:
    return _always.get() or dispatch.named_choice()


def is_fixed() -> bool:
    """Whether the program is schedule-invariant."""
    return _name() in (NAME, INTERPRETED)


def kernel_options() -> dict[str, Any] | None:
    """The options of kernels that fix the order; None where C++ does, or nothing. Interpreted ones are a TPU's, unless
    the choice of kernels is for GPU."""
    interpret, platform = _name() == INTERPRETED, dispatch.platform()
    if interpret or (is_fixed() and platform != "cpu"):
        return {"platform": "tpu" if platform == "cpu" else platform, "interpret": interpret}
    return None


@contextlib.contextmanager
def fixed(name: str = NAME) -> Iterator[None]:
    """What is traced inside is schedule-invariant."""
    token = _always.set(name)
    try:
        yield
    finally:
        _always.reset(token)


def implementations(
    on_cpu: Callable[..., Any],
    elsewhere: Callable[..., Any] | None,
    refused: Callable[..., str | None] = lambda *args, **kwargs: None,
) -> list[dispatch.Implementation]:
    """The schedule-invariant entries of an operation's table; only their names choose them.

    elsewhere: on TPU and GPU, and interpreted; None: there it is not built.
    refused: why `elsewhere` cannot run a call; None: it can.
    """

    def entry(name: str) -> dispatch.Implementation:
        def run_fixed(*args: Any, **kwargs: Any) -> Any:
            with fixed(name):
                return (on_cpu if kernel_options() is None else cast(Any, elsewhere))(*args, **kwargs)

        def unsupported(*args: Any, **kwargs: Any) -> str | None:
            arrays = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "dtype")]
            floats = [v.dtype for v in arrays if jnp.issubdtype(v.dtype, jnp.floating)]
            if other := [dtype for dtype in floats if dtype not in (F32, jnp.bfloat16)]:
                return f"arrays are {other[0]}, not float32 or bfloat16"
            if name == NAME and dispatch.platform() == "cpu":
                return native.WHY_MISSING
            with fixed(name):
                return "it is not built for TPU and GPU" if elsewhere is None else refused(*args, **kwargs)

        return dispatch.Implementation(name, run_fixed, unsupported, automatic=False)

    return [entry(NAME), entry(INTERPRETED)]


def _on_each_device(kernel: Callable[..., Array], outputs: int = 0) -> Callable[..., Array]:
    """On several devices, outside of `shard_map`, each computes the whole: the compiler cannot divide a kernel or C++.

    The `outputs` of a product are divided over the last axis of the mesh, as the rows of a head are, if they can be.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return kernel
    whole, axis = PartitionSpec(), mesh.axis_names[-1]
    divides = outputs > 0 and outputs % mesh.shape[axis] == 0
    given: Any = (whole, PartitionSpec(axis)) if divides else whole
    result = PartitionSpec(None, axis) if divides else whole
    return jax.shard_map(kernel, mesh=mesh, in_specs=given, out_specs=result, check_vma=False)


def product(
    rows: Float[Array, "n inputs"], weight: Num[Array, "outputs inputs"], *, divided: bool = False
) -> Float[Array, "n outputs"]:
    """rows times the transpose of weight (float32, bfloat16 or int8), in float32; the order of a row's sums is fixed.

    By C++ in any program, by a kernel in those for TPU and GPU. `divided`: outside of `shard_map`, each device computes
    its part of the outputs: a whole head would be gathered on each.
    """
    options = kernel_options()

    def by_cpp(rows, weight):
        result = jax.ShapeDtypeStruct((len(rows), len(weight)), F32)
        return jax.ffi.ffi_call(native.target("linear"), result)(native.operand(rows, weight), weight)

    def plain(rows, weight):
        return jnp.matmul(rows.astype(F32), weight.T.astype(F32), precision=lax.Precision.HIGHEST)

    outputs = len(weight) if divided else 0
    run = by_cpp if options is None else functools.partial(fixed_blocks.product, **options)
    return dispatch.differentiable(_on_each_device(run, outputs), plain)(rows, weight)


def products(rows: Float[Array, "heads n inputs"], weights: Float[Array, "heads outputs inputs"]) -> Array:
    """One `product` for each head [heads, n, outputs]."""
    if kernel_options() is not None:
        return jax.vmap(product)(rows, weights)
    return jnp.stack([product(*each) for each in zip(rows, weights, strict=True)])


def row_sum(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """The sum over the last axis, which is kept. Kernels add up parts of a long row, then the sums of the parts."""
    if not is_fixed():
        return x.sum(-1, keepdims=True)
    if kernel_options() is not None and x.shape[-1] > _MOST_SUMMED:
        whole = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _MOST_SUMMED)])
        return row_sum(row_sum(whole.reshape(*x.shape[:-1], -1, _MOST_SUMMED))[..., 0])
    # Barriers here and below keep functions on both sides apart while the compiler rewrites them.
    rows = lax.optimization_barrier(x.reshape(-1, x.shape[-1]))
    return product(rows, jnp.ones((_LEAST_OUTPUTS, x.shape[-1]), F32))[:, :1].reshape(*x.shape[:-1], 1)


def cumulative_sum(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """The sums of the numbers up to each, along the last axis."""
    if kernel_options() is None:
        return jnp.cumsum(x, axis=-1)
    return product(x.reshape(-1, x.shape[-1]), jnp.tri(x.shape[-1])).reshape(x.shape)


def row_max(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """The maximum over the last axis, which is kept.

    XLA:CPU gives a maximum of many floats to a library, with the functions around it, which that rounds in its own way.
    A schedule-invariant program therefore compares the order of the bits.
    """
    if not is_fixed():
        return x.max(-1, keepdims=True)

    def by_bits(x):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return lax.bitcast_convert_type(ordered(ordered(bits).max(-1, keepdims=True)), F32)

    return dispatch.differentiable(by_bits, lambda x: x.max(-1, keepdims=True))(x.astype(F32))


def ordered(bits: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Converts bits of float32 to integers of the same order, and back: -nan < -inf < ... < -0 < 0 < ... < inf < nan.

    Also inside of kernels.
    """
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _elementwise(name: str, otherwise: Callable[[Array], Array], x: Array) -> Array:
    """A function of each element. Fixed, it is computed by C++ or a kernel in float32 and rounded once to x's dtype.

    The compiler has forms of exp for some numbers of lanes. For others, such as the 12 numbers of two tokens with 6
    experts, it calls a library, which rounds in another way.
    """
    if not is_fixed():
        return otherwise(x)

    def by_cpp(wide):
        result = jax.ShapeDtypeStruct(wide.shape, F32)
        return jax.ffi.ffi_call(native.target("elementwise"), result)(wide, function=name)

    run: Callable[[Array], Array] = by_cpp
    if (options := kernel_options()) is not None:
        run = _on_each_device(functools.partial(fixed_blocks.elementwise, otherwise, **options))
    return dispatch.differentiable(run, otherwise)(x.astype(F32)).astype(x.dtype)


exp: Callable[[Array], Array] = functools.partial(_elementwise, "exp", jnp.exp)
log: Callable[[Array], Array] = functools.partial(_elementwise, "log", jnp.log)
sigmoid: Callable[[Array], Array] = functools.partial(_elementwise, "sigmoid", jax.nn.sigmoid)
softplus: Callable[[Array], Array] = functools.partial(_elementwise, "softplus", jax.nn.softplus)


def silu(x: Array) -> Array:
    return _elementwise("silu", jax.nn.silu, x)  # a function: modules hold it, and their structure is stored


def log_sum_exp(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """log(sum(exp(x))) over the last axis, which is kept."""
    if not is_fixed():
        return jax.nn.logsumexp(x, axis=-1, keepdims=True)
    highest = row_max(x)
    # If all values are -inf, or one is inf: avoids inf - inf.
    base = jnp.where(jnp.isfinite(highest), highest, 0)
    return base + log(row_sum(exp(x - base)))


def softmax(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """exp(x) over its sum over the last axis."""
    if not is_fixed():
        return jax.nn.softmax(x, axis=-1)
    shares = exp(x - row_max(x))
    return quotient(shares, row_sum(shares))


def quotient(x: Float[Array, "*batch n"], total: Float[Array, "... 1"]) -> Float[Array, "*batch n"]:
    """x / total. Of a single row the compiler would make a product with 1 / total."""
    return x / (lax.optimization_barrier(jnp.broadcast_to(total, x.shape)) if is_fixed() else total)


def rounded(x: Array) -> Array:
    """Returns a product that a sum takes next; schedule-invariant programs round it first.

    Where the compiler sees both, it decides for each program whether product and sum are one instruction that rounds
    once. It cannot look through an exclusive or with a value that is known only at run time to be 0.
    """
    if not is_fixed() or x.dtype != F32:  # the conversion between product and sum rounds
        return x

    def by_bits(x):
        zero = product(jnp.zeros((1, 1), F32), jnp.zeros((_LEAST_OUTPUTS, 1), F32))[0, 0]
        bits = lax.bitcast_convert_type(x, jnp.uint32) ^ lax.bitcast_convert_type(zero, jnp.uint32)
        return lax.bitcast_convert_type(bits, F32)

    return dispatch.differentiable(by_bits, lambda x: x)(x)


def weighted_sum(weights: Float[Array, "T n"], values: Float[Array, "T n size"]) -> Float[Array, "T size"]:
    """The sum of a few values times their weights, in the order of the values."""
    if not is_fixed():
        return jnp.einsum("tn,tni->ti", weights, values)
    return functools.reduce(operator.add, (rounded(weights[:, n, None] * values[:, n]) for n in range(values.shape[1])))


def product_by_head(x: Float[Array, "T heads inputs"], weight: Float[Array, "heads outputs inputs"]) -> Array:
    """A product for each head [T, heads, outputs], summed in float32 and rounded once to x's dtype."""
    if is_fixed():
        return products(x.swapaxes(0, 1), weight).swapaxes(0, 1).astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == F32 else lax.Precision.DEFAULT
    return jnp.einsum("thi,hoi->tho", x, weight, precision=precision, preferred_element_type=F32).astype(x.dtype)


def router_product(x: Float[Array, "T inputs"], weight: Float[Array, "outputs inputs"]) -> Float[Array, "T outputs"]:
    """x W^T in float32, at the highest precision."""
    x = x.astype(F32)
    if is_fixed():
        return product(x, weight)
    whole = functools.partial(
        lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    if x.shape[0] > FEW_TOKENS:
        return whole(x, weight)
    return lax.platform_dependent(x, weight, cuda=products_as_sums, default=whole)


def products_as_sums(x: Float[Array, "T inputs"], weight: Float[Array, "outputs inputs"]) -> Float[Array, "T outputs"]:
    """The product as sums: XLA for GPU computes them together with what follows."""
    return (x[:, None, :] * weight).sum(-1)
