"""/v1/files and /v1/batches: requests that clients leave as a file, answered beside the others."""
