"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LoadLoraRequest(BaseModel):
    """``lora_path`` is a folder that the engine can read, or a hub name. ``load_inplace`` replaces one of that name.

    ``base_model_name`` says which of several models it is for.
    """

    model_config = ConfigDict(extra="allow")

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadLoraRequest(BaseModel):
    """``lora_int_id`` is accepted for vLLM's sake: the name decides."""

    model_config = ConfigDict(extra="allow")

    lora_name: str
    lora_int_id: int | None = None
