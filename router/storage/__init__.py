"""Storage of what clients keep at a router beyond a request: responses, files and batches."""
