"""Request and response bodies, as OpenAI documents them, with vLLM's extras."""
