"""One module for each stage, with `run(context)`. Nothing here is imported before its stage runs."""
