"""``qiao run``: one answer from a model in this process, without a server."""

from __future__ import annotations

from typing import Annotated

import typer


def run(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, hub name or pypi:PACKAGE.")],
    prompt: Annotated[str, typer.Argument(help="The user's message, or with --raw the text to continue.")],
    device: Annotated[str, typer.Option("--device", help="auto, a plugin's name, or a torch device.")] = "auto",
    fallback: Annotated[str, typer.Option("--fallback", help="allow, warn or deny operators on the CPU.")] = "warn",
    drop: Annotated[list[str] | None, typer.Option("--drop", help="Hook of the plugin to leave unused.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", min=1, help="Context, in tokens.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
) -> None:
    """Answer PROMPT with MODEL here and now, and print the answer while it is made."""
    from qiao import LLM, RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, output_kind=RequestOutputKind.DELTA
    )
    llm = LLM(
        model=model, device=device, fallback=fallback, drop=tuple(drop or ()), dtype=dtype, max_model_len=max_model_len
    )
    messages = [{"role": "user", "content": prompt}]
    try:
        for result in llm.stream(prompt, params) if raw else llm.stream_chat(messages, params):
            print(result.outputs[0].text, end="", flush=True)
    finally:
        print(flush=True)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)
