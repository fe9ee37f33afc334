"""Tables, plots and the page of a study, all folded from its records; nothing here measures.

Modules: `study` (what a results folder holds), `tables`, `plots` (one file a plot), `html` (`write_report`), `view`.
"""
