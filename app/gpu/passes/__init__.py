"""A row on its way up the layers: where it breaks, which segments it runs in, how it is split."""
