"""Dashboard for Mixture-of-Experts training runs.

It reads run folders while the trainer writes them and never imports the trainer: the two meet in
the run folder's files only. Modules, bottom first: `errors`, `variables`, `formats`, `demo`,
`store`, `alerts`, `queries`, `charts`, `panels`, `figures`, `export`, `shell`, `pages`, `app`,
`cli`.
"""

__version__ = "0.1.0"
