"""KV memory of an engine: which blocks hold what, the tensors behind them, and how many there are."""
