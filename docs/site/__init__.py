"""The site of the documentation: what `make docs` builds of these pages. `python -m docs.site` starts it."""
