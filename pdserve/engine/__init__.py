"""The inference engine: block pool, scheduler, model runner, sampler."""
