"""What a router keeps for its clients beyond a request: responses, files and batches."""
