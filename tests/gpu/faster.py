"""Triton's interpreter without its largest cost: it patches the whole language anew whenever a device function is called."""

import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Patch for a call only what a launch, or an earlier call, has not patched."""

    def call(self, *args, **known):
        if any((value is tl or value is tl.core) and tl.core.is_builtin(value.load) for value in self.fn.__globals__.values()):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **known)

    interpreter.InterpretedFunction.__call__ = call


patch_once()  # so that `pytest -p faster` is enough
