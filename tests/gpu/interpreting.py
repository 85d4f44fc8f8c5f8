"""Triton's interpreter in half of the time: it puts its own functions into the language once for each launch.

As it comes, it does that again for each call of a function by a kernel, and looks through the whole language for it.
"""

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


def patch_once_for_each_launch() -> None:
    """From here on. It does nothing with a Triton whose interpreter is another one."""
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope: Callable[[], Any] | None = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return
    launch, patched = interpreter.GridExecutor.__call__, set[int]()

    def patch_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value in (language, language.core)}
        if seen <= patched:
            return scope()
        patched.update(seen)
        return patch(function)

    def launch_and_forget(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            launch(self, *arguments, **named)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_and_forget
