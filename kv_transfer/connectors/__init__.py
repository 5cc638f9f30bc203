"""The built-in connectors, one or more modules each."""
