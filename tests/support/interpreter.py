"""Triton's interpreter without the work that it repeats:
the same results in a fraction of the time.
"""

import inspect
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def patch_once():
    """Lets the interpreter replace the language's functions once in a launch, and look a type up
    once.

    The interpreter replaces every function of `triton.language` when a kernel is launched, and
    again at each call of a function that the kernel calls, thousands of times in a launch and to no
    effect. It also makes its table of types anew for each tile, and each tile's shape and type
    several times for each operation. A Triton without these functions is left as it is.
    """
    names = "_patch_lang", "_patch_attr", "_get_np_dtype", "_convert_float", "_LangPatchScope"
    if not all(hasattr(interpreter, name) for name in names):
        return
    replace, types = interpreter._patch_lang, interpreter._get_np_dtype
    replaced, known = set(), {}

    @cache
    def languages(fn):
        modules = filter(inspect.ismodule, fn.__globals__.values())
        return {id(module) for module in modules} & {id(interpreter.tl), id(interpreter.tl.core)}

    def patch_lang(fn):
        needed = languages(fn)
        if replaced and needed <= replaced:
            return interpreter._LangPatchScope()
        launch, scope = not replaced, replace(fn)
        replaced.update(needed)
        if launch:
            restore = scope.restore

            def end():
                replaced.clear()
                restore()

            scope.restore = end
        return scope

    def get_np_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = types(dtype)
        return known[dtype.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype
    interpreter._convert_float = partial(convert_float, interpreter._convert_float)

    def patch_attr(obj, name, member, builder, scope):
        # without its question whether it has `_semantic`
        call = getattr(member, "__wrapped__", member)

        def with_semantic(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return call(*args, **kwargs)

        scope.set_attr(obj, name, with_semantic)

    interpreter._patch_attr = patch_attr
    sanitize = TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize_overflow(self, lhs, rhs, binary_op):
        # without `debug`, nobody looks at what this computes
        if self.builder.options.debug:
            sanitize(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = sanitize_overflow
    if all(
        hasattr(core, name)
        for name in ("_unwrap_if_constexpr", "_type_for_tuple_values", "block_type")
    ):
        remember_shapes()


def convert_float(otherwise, x, source, target, rounding):
    """Returns the bits of x as bfloat16, which are the first half of float32's, or as float32.

    Triton makes them in twenty steps. Other types, and subnormal numbers, are left to it.
    """
    pair = source.name, target.name
    if rounding is None and pair in (("fp32", "bf16"), ("bf16", "fp32")):
        bits = x.view(np.uint32 if pair[0] == "fp32" else np.uint16)
        # zero less one is the largest number
        if not ((bits << 1) - 1 < (2 << source.fp_mantissa_width) - 1).any():
            return (
                (bits >> 16).astype(np.uint16)
                if pair[0] == "fp32"
                else bits.astype(np.uint32) << 16
            )
    return otherwise(x, source, target, rounding)


def remember_shapes():
    """Lets tiles of one shape share what Triton makes of it: a tuple,
    its type, a number and their names.
    """
    unwrap, make_block = core._unwrap_if_constexpr, core.block_type.__init__
    make_tensor = core.tensor.__init__
    broadcast, check, get, equal = (
        TritonSemantic.broadcast_impl_value,
        TritonSemantic.binary_op_type_checking_impl,
        core.tuple.__getattr__,
        core.dtype.__eq__,
    )
    # what is made of a shape, by its numbers and by the tuple that types have of it, which is kept
    # alive here
    shapes, made = {}, {}
    # The shape that two shapes have together. For the two operands of an operation NumPy makes it
    # itself, so neither is written as wide as its type says; `narrow` has an element meanwhile.
    joined, narrow = {}, []
    plain = {
        int,
        float,
        bool,
        type(None),
        core.tensor,
        core.dtype,
        core.block_type,
        core.pointer_type,
    }
    alone = core.constexpr(1), core.tuple([])

    def unwrap_if_constexpr(x):
        kind = type(x)
        return x.value if kind is core.constexpr else x if kind in plain else unwrap(x)

    def init_block(self, element_ty, shape):
        if (entry := made.get(id(shape))) is None:
            key: Any = tuple([unwrap_if_constexpr(n) for n in shape])
            if (entry := shapes.get(key)) is None:
                make_block(self, element_ty, shape)  # which refuses a wrong one
                of_tensors = core.constexpr(prod(key)), core.tuple([core.constexpr(n) for n in key])
                entry = self.shape, self.numel, str(self.shape), of_tensors
                shapes[key] = made[id(self.shape)] = entry
        self.element_ty, (self.shape, self.numel, name, self.of_tensors) = element_ty, entry
        self.name = f"<{name}, {element_ty}>"

    def init_tensor(self, handle, type):
        known = getattr(type, "of_tensors", None) if type.is_block() else alone
        if known is None:
            return make_tensor(self, handle, type)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known

    def init_tuple(self, args, type=None):
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get_of_tuple(self, name):
        if name == "type":
            self.type = core._type_for_tuple_values(self.values)
            return self.type
        return get(self, name)

    def broadcast_value(self, lhs, rhs):
        left, right = (x.type.shape if x.type.is_block() else None for x in (lhs, rhs))
        if left is right:
            return lhs, rhs
        if not narrow:
            return broadcast(self, lhs, rhs)
        if (both := joined.get((id(left), id(right)))) is None:
            wide = broadcast(self, lhs, rhs)
            joined[id(left), id(right)] = wide[0].type.shape
            return wide
        return tuple(
            x if shape is both else core.tensor(x.handle, core.block_type(x.type.scalar, both))
            for x, shape in ((lhs, left), (rhs, right))
        )

    def check_types(self, *arguments, **named):
        narrow.append(True)
        try:
            return check(self, *arguments, **named)
        finally:
            narrow.pop()

    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core._unwrap_if_constexpr, core.block_type.__init__ = unwrap_if_constexpr, init_block
    core.tensor.__init__, core.tuple.__init__ = init_tensor, init_tuple
    core.tuple.__getattr__, TritonSemantic.broadcast_impl_value = get_of_tuple, broadcast_value
    TritonSemantic.binary_op_type_checking_impl = check_types
