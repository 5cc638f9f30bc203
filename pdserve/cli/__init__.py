"""The `pdserve` command line, and supervision of the processes that it starts.

In reading order: commands, flags, up, deployment, supervisor, fork_server, workers, signals, logs; demo, doctor, gpus,
operate, ray_deployment, gguf.
"""
