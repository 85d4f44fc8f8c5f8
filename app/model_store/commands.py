"""What `djinn models` does."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.model_store.catalog import CATALOG, catalog_entry
from app.model_store.pull import model_folder, pull_model


def pull(name: str, cache_dir: Path) -> None:
    """Fetch a catalogue model and print its folder. Raises UnknownModel or ModelStoreError."""
    entry = catalog_entry(name)
    console = Console(stderr=True)
    if model_folder(name, cache_dir).is_dir():
        console.print(f"{name} is already here")
    print(pull_model(entry, cache_dir, console))


def list_models(cache_dir: Path) -> None:
    """Print the catalogue, and which of it is here."""
    table = Table("model", "pulled", "licence", "what it is")
    for entry in CATALOG.values():
        here = "yes" if model_folder(entry.name, cache_dir).is_dir() else "no"
        table.add_row(entry.name, here, entry.licence, entry.summary)
    Console().print(table)
