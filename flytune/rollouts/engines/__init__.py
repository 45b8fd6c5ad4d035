"""vLLM, which draws answers beside the trainer: its server's API, its process, and the types it loads."""
