"""`python -m loadgen`."""

import sys

EXTRA = ("lz4", "matplotlib", "ml_dtypes", "zstandard")
"""What a server can do without."""

try:
    from loadgen.cli import main
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA:
        raise
    print(f"loadgen: {package} is missing: pip install 'djinn-server[loadgen]'", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
