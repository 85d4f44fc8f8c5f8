"""vLLM in two parts of at most 64 MiB each, beside the checkout: `python -m benchmarks.gpu_rivals.packing`.

The wheel has 290 MiB. Left out are kernels of other architectures, those of models that are not measured, and the
server's programs in Rust. The first part has the kernels, the second one all that is Python.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

from benchmarks.gpu_rivals.fatbin import keep_architecture

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
