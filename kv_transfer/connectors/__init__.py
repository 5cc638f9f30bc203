"""The built-in connectors, with one or more modules each."""
