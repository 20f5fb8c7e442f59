"""rolloutsync drives SGLang and vLLM rollout engines from synchronous trainers: threads, no asyncio."""
