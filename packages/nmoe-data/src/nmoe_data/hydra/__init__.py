"""The judge: an LLM grades a sample, small heads learn its grades, a corpus is filtered by them."""
