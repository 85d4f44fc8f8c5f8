"""What every experiment writes: one report as JSON, from which a page, pictures and tables for the terminal are made.

A `report.Report` has flat rows (`tables.Table`), figures that are held against targets (`figures.Figure`), and charts
that draw columns of its tables (`charts.Chart`). `page.write_outputs` writes all files of it.
"""
