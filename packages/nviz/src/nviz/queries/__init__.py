"""SQL over a run's tables and the arithmetic on what it returns: pure functions, no state."""
