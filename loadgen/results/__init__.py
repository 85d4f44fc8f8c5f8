"""What every experiment writes: a result as JSON, a page as HTML, its figures as PNG, its tables for the terminal.

An experiment's report is a dataclass that extends `files.Result`. It is turned into a `page.Page` of `figures.Figure`s,
drawn with `plots`, and `tables.TextTable`s. `page.write_outputs` writes all files; `tables.to_rich` is for the
terminal.
"""
