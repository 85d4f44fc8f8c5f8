"""vLLM in two parts of at most 64 MiB each, beside the checkout: `python -m benchmarks.gpu_rivals.packing`.

The wheel has 290 MiB. Left out are kernels of other architectures, those of models that are not measured, and the
server's programs in Rust. The first part has the kernels, the second one all that is Python.

The CUDA driver reads the headers in a library's `.nv_fatbin` section and loads the entry that fits the device best. So
a device of one architecture needs no other entry. The layout of the headers is that of `fatbinary_section.h` in the
CUDA toolkit and of github.com/n-eiling/cuda-fatbin-decompression.
"""

import argparse
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

_HEAD = 0xBA55ED50, 1, 16
"""Magic number, version, bytes of this header."""
_MAGIC = struct.pack("<IHH", *_HEAD)
_FATBIN = struct.Struct("<IHHQ")
"""Those, and the bytes of all entries."""
_ENTRY = struct.Struct("<HHIQIIHHI")
"""Kind, version, bytes of this header, bytes of the payload, two sizes, two of the version, architecture."""
_PTX, _MACHINE_CODE = 1, 2


class Entry(NamedTuple):
    """Code of one kind for `architecture`, such as 90; its header and payload are `library[start:end]`."""

    kind: int
    architecture: int
    start: int
    end: int


def keep_architecture(library: bytes, architecture: int) -> bytearray:
    """The library with zeros in place of the code that a device of `architecture` does not load. Of each file's kernels
    it keeps the machine code of the nearest lower architecture of the same generation, or else PTX of lower ones.
    """
    kept = bytearray(library)
    for at, entries in _fatbins(library):
        fitting = [
            each.architecture
            for each in entries
            if each.kind == _MACHINE_CODE
            and each.architecture <= architecture
            and each.architecture // 10 == architecture // 10
        ]
        loaded = b"".join(
            library[start:end]
            for kind, built_for, start, end in entries
            if (kind == _MACHINE_CODE and built_for == max(fitting) if fitting else built_for <= architecture)
            and kind == (_MACHINE_CODE if fitting else _PTX)
        )
        kept[at : entries[-1].end] = _FATBIN.pack(*_HEAD, len(loaded)) + loaded.ljust(
            entries[-1].end - at - _FATBIN.size, b"\0"
        )
    return kept


def _fatbins(library: bytes) -> Iterator[tuple[int, list[Entry]]]:
    """Where each fat binary is, and its entries."""
    at = library.find(_MAGIC)
    while at >= 0:
        *_, size = _FATBIN.unpack_from(library, at)
        begin, end = at + _FATBIN.size, at + _FATBIN.size + size
        entries = []
        while begin < end:
            kind, _, header, payload, _, _, _, _, built_for = _ENTRY.unpack_from(library, begin)
            entries.append(Entry(kind, built_for, begin, begin + header + payload))
            begin += header + payload
        yield at, entries
        at = library.find(_MAGIC, end)


ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(__file__).with_name("wheels.txt")
PARTS = (".rivals-1", ".rivals-2")
MOST_BYTES = 64 << 20
"""Of one part and the checkout beside it."""
GLIBCS = (39, 38, 35, 34, 31, 28, 27, 26, 24, 17)
KERNELS = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/_flashmla*",
    "vllm/_qutlass*",
    "vllm/_rust*",
    "vllm/vllm_flash_attn/_vllm_fa2*",
    "vllm/third_party/*/include/*",
    "vllm/third_party/deep_gemm/_C*",
    "*.a",
    "*.data/*",
)


def main() -> int:
    """Downloads, packs, and tells the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU; default 90, an H100 or H200")
    parser.add_argument("--to", type=Path, default=ROOT, help="where the two folders go; default the checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder))
        sizes = pack(sorted(Path(folder).glob("*.whl")), options.to, options.architecture)
    beside = checkout_bytes()
    for part, size in zip(PARTS, sizes, strict=True):
        print(f"{part}: {size / 2**20:.1f} MiB, {(size + beside) / 2**20:.1f} MiB with the checkout")
    return 0 if max(sizes) + beside <= MOST_BYTES else 1


def download(folder: Path) -> None:
    """The wheels of `wheels.txt`, for Python 3.12. Raises `CalledProcessError`."""
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in GLIBCS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    target = ["--python-version=3.12", "--implementation=cp", *(f"--abi={abi}" for abi in ("cp312", "abi3", "none"))]
    files = [f"--dest={folder}", f"--requirement={WHEELS}"]
    subprocess.run([*command, *target, *platforms, "--platform=manylinux2014_x86_64", *files], check=True)


def pack(wheels: list[Path], to: Path, architecture: int) -> list[int]:
    """Write `rival.tar.xz` into each of `PARTS` under `to`; their sizes in bytes."""
    paths = [to / part / "rival.tar.xz" for part in PARTS]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(paths[0], "w:xz") as kernels, tarfile.open(paths[1], "w:xz") as python:
        for wheel in wheels:
            with ZipFile(wheel) as opened:
                for name in opened.namelist():
                    if name.endswith("/") or any(fnmatch(name, pattern) for pattern in LEFT_OUT):
                        continue
                    content = opened.read(name)
                    if name in KERNELS:
                        _add(kernels, name, bytes(keep_architecture(content, architecture)))
                    else:
                        _add(python, name, content)
    return [path.stat().st_size for path in paths]


def checkout_bytes() -> int:
    """Of all files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum((ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(content)
    archive.addfile(about, BytesIO(content))


if __name__ == "__main__":
    sys.exit(main())
