"""/v1/files and /v1/batches: requests that clients leave as a file, answered beside the others.

In reading order: endpoints, schemas, batch_queue, answer_files, file_store.
"""
