"""How the CPU kernels are compiled, and where their machine code is kept."""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import pickle
import platform
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import njit, types
from numba.core import config
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from app.gpu.kernels.cpu import compiling
from app.machine.files import make_private_folder

logger = logging.getLogger(__name__)

_IMPORT = re.compile(r"^from (app\.gpu\.kernels[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
_KEPT_DAYS = 60
_PATIENCE_S, _LOOK_S = 60.0, 0.05
"""How long a process waits for another one's kernel, which may be suspended, and how often it looks."""
_STARTED = time.time()
"""Of this process. A file that has changed since may not be what it has imported."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""The call's number on x86-64, ARCH_REQ_XCOMP_PERM, and XFEATURE_XTILEDATA."""
_OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "boundscheck": False}

P = ParamSpec("P")
R = TypeVar("R")


def compiled_features() -> frozenset[str]:
    """Instruction sets that kernels are compiled for, in LLVM's words: the processor's, or NUMBA_CPU_FEATURES. Those of
    AMX only if the system lets this process use its registers.
    """
    told: Any = vars(config)["CPU_FEATURES"]
    if told is not None:
        found = {word[1:] for word in told.split(",") if word.startswith("+")}
    else:
        found = {name for name, is_there in llvm.get_host_cpu_features().items() if is_there}
    return frozenset(name for name in found if not name.startswith("amx") or _has_tile_registers())


@functools.cache
def _has_tile_registers() -> bool:
    """Ask Linux for AMX's registers, which all threads of this process then have (`arch_prctl(2)`)."""
    if sys.platform != "linux" or platform.machine() != "x86_64":  # the number is that of another call there
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile into the kernel, where constant arguments stay constant. Never called from Python."""
    compiled = njit(forceinline=True, **_OPTIONS)(function)
    return cast("Callable[P, R]", compiled)


def c_function(kernel: Callable[[int], None], *parts: Any) -> Any:
    """Compile `kernel`, which takes the address of its arguments; the result's `address` is a C function. `parts` tell
    it from other kernels of the same closure. The machine code is kept in `kernel_folder()`, for every checkout and
    process of this user. Where that folder cannot be written to, each start recompiles it, which takes some seconds.
    """
    compiled = _Kernel(kernel, parts)
    compiled.compile()
    return compiled


def kernel_folder() -> Path:
    """Where machine code is kept: below the folder of models, in DJINN_CACHE_DIR or ~/.cache/djinn."""
    return Path(os.environ.get("DJINN_CACHE_DIR") or "~/.cache/djinn").expanduser() / "kernels"


class _Kernel(CFunc):
    """A kernel and its cache: machine code in a file whose name is a digest of all that it depends on. Numba's own
    cache lies next to the source, for each checkout, and does not notice when another file of the kernel's changes.
    """

    def __init__(self, kernel: Callable[[int], None], parts: tuple[Any, ...]) -> None:
        untyped: Any = super()
        untyped.__init__(kernel, ((types.int64,), types.void), locals={}, options=dict(_OPTIONS))
        self._cache = self
        modules = {kernel.__module__}
        self._identity = _identity((kernel, parts), modules)
        self._files = imported_files(frozenset(modules))
        self._name = kernel.__qualname__.split(".")[0].strip("_")
        self._path: Path | None = None

    def compile(self) -> None:
        """Load the machine code, or make it. Of several processes that lack it one does, and the others wait for it."""
        own: Any = self
        untyped: Any = super()
        self._path = path = self._find_path(own._sig, own._targetdescr.target_context)
        with nullcontext() if path is None or path.exists() else _alone(path):
            untyped.compile()

    def _compile_uncached(self) -> Any:
        untyped: Any = super()
        with compiling():
            return untyped._compile_uncached()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled kernel, or None. Prepares Numba's runtime alone: the compiler takes half a second."""
        path = self._path
        if path is None:
            return None
        with suppress(Exception):  # no file, a damaged one, or one of another Numba: the kernel is recompiled
            payload = pickle.loads(path.read_bytes())
            runtime: Any = rtsys
            runtime.initialize(target_context)
            rebuilt = CompileResult._rebuild(target_context, *payload)  # type: ignore[no-untyped-call]
            with suppress(OSError):
                os.utime(path)  # `_remove_unused` sees when it was last used
            return rebuilt
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep the machine code, and remove what was not used for long. Several processes may do so at once."""
        path = self._path
        if path is None or compiled.lifted or compiled.library.has_dynamic_globals:  # addresses of this process
            return
        try:
            with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
                try:
                    file.write(dumps(compiled._reduce()))  # type: ignore[no-untyped-call]
                    Path(file.name).replace(path)
                except OSError:
                    Path(file.name).unlink()
                    raise
            _remove_unused(path.parent)
        except OSError as error:
            _warn_once(f"compiled kernels are not kept: cannot write to {path.parent}: {error.strerror}")

    def _find_path(self, signature: Any, target_context: Any) -> Path | None:
        """None where the machine code can be neither kept nor trusted."""
        folder = kernel_folder()
        if not _is_ours(folder) or any(path.stat().st_mtime > _STARTED for path in self._files.values()):
            return None
        target = target_context.codegen().magic_tuple(), sorted(compiled_features())
        versions = numba.__version__, llvmlite.__version__, sys.version_info[:3]
        digest = hashlib.sha256(repr((versions, str(signature), target, self._identity)).encode())
        for module, path in self._files.items():
            digest.update(module.encode() + path.read_bytes())
        return folder / f"{self._name}-{digest.hexdigest()[:40]}"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock this kernel's byte in a file beside the folder. After `_PATIENCE_S`, go on without the lock: at once,
    if the file system has none.
    """
    folder, place, until = path.parent.resolve(), int(path.name[-12:], 16), time.monotonic() + _PATIENCE_S
    try:
        file = folder.with_name(f"{folder.name}.lock").open("a")
    except OSError:
        yield
        return
    with file:
        while time.monotonic() < until:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            except (BlockingIOError, PermissionError):  # another has it: POSIX allows both
                time.sleep(_LOOK_S)
            except OSError:
                break
        yield


def _is_ours(folder: Path) -> bool:
    """Whether the folder is there, or can be made, and no other user may write to it: machine code in it is run."""
    try:
        make_private_folder(folder)
        found = folder.stat()
    except OSError as error:
        _warn_once(f"compiled kernels are not kept: cannot make {folder}: {error.strerror}")
        return False
    is_ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_ours:
        _warn_once(f"compiled kernels are not kept: other users may write to {folder}")
    return is_ours


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s; each start recompiles them", text)


def _remove_unused(folder: Path) -> None:
    oldest = time.time() - _KEPT_DAYS * 86400
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process was quicker
            if path.stat().st_mtime < oldest:
                path.unlink()


def _identity(value: Any, modules: set[str]) -> Any:
    """What tells `value`, a part of a kernel, from others in any process. Adds modules whose code goes into it."""
    if isinstance(value, tuple):
        return [_identity(part, modules) for part in value]
    function = getattr(value, "py_func", value)
    if not isinstance(function, FunctionType):
        return repr(value)
    modules.add(function.__module__)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    place = function.__module__, function.__qualname__, function.__code__.co_firstlineno
    return place, [_identity(part, modules) for part in (*(function.__defaults__ or ()), *cells)]


@functools.cache
def imported_files(modules: frozenset[str]) -> dict[str, Path]:
    """The files of these modules, and of all of this room that they import, by module: no others change kernels."""
    waiting, found = list(modules), dict[str, Path]()
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in found or file is None:  # no module, but something in one
            continue
        found[name] = Path(file)
        for module, names in _IMPORT.findall(found[name].read_text()):
            waiting += [module, *(f"{module}.{each}" for each in re.findall(r"\w+", names))]
    return dict(sorted(found.items()))
