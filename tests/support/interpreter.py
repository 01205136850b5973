"""Triton's interpreter without the work that it repeats: the same results in half of the time."""

import inspect
from functools import cache

from triton.runtime import interpreter


def patch_once():
    """Lets the interpreter replace the language's functions once in a launch, and look a type up once.

    The interpreter replaces every function of `triton.language` when a kernel is launched, and again at each
    call of a function that the kernel calls, thousands of times in a launch and to no effect. It also makes
    its table of types anew for each tile. A Triton without these functions is left as it is.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "_LangPatchScope")):
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
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    def get_np_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = types(dtype)
        return known[dtype.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype
