"""LoRA adapters as users name them; ``qiao.lora.request`` has the names of ``vllm.lora.request``."""
