"""What `djinn models` does."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.model_store.catalog import CATALOG, catalog_entry
from app.model_store.export import export_model
from app.model_store.pull import pull_model, pulled_folder


def pull(name: str, cache_dir: Path) -> None:
    """Fetch a catalogue model and print its folder. Raises UnknownModel or ModelStoreError."""
    entry = catalog_entry(name)
    console = Console(stderr=True)
    if pulled_folder(entry, cache_dir).is_dir():
        console.print(f"{name} is already here")
    print(pull_model(entry, cache_dir, console))


def export(spec: str, cache_dir: Path) -> None:
    """Print the Transformers folder of a model, made if need be. Raises what `export_model` raises."""
    print(export_model(spec, cache_dir))


def list_models(cache_dir: Path) -> None:
    """Print the catalogue, and which of it is here."""
    table = Table("model", "pulled", "licence", "what it is")
    for entry in CATALOG.values():
        here = "yes" if pulled_folder(entry, cache_dir).is_dir() else "no"
        table.add_row(entry.name, here, entry.licence, entry.summary)
    Console().print(table)
