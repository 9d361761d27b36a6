"""Text to token shards and back to batches, with every token traceable to its source.

The modules are the public interface, bottom first: `errors`, `files`, `tokenizer`, `shards`,
`sources`, `prep`, `loader`, `stats`, `cli`. Nothing is imported here, so that `nmoe-data --help`
starts at once.
"""

__version__ = "0.1.0"
