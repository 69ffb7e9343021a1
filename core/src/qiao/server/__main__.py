"""``python -m qiao.server MODEL [flags]``, the same as ``qiao serve``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qiao.devices import check_device_name
from qiao.errors import QiaoError, UsageError


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, serve, and exit: 0 after a drained stop, 2 for a mistake of the user, 1 for anything else that fails."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        from qiao.server.help import help_text

        print(help_text())
        raise SystemExit(0)
    try:
        from qiao.server.flags import parse

        parsed = parse(words)
        for note in parsed.notes:
            print(f"qiao: warning: {note}", file=sys.stderr)
        for spec in parsed.setup.models:
            check_device_name(spec.engine.device)
        from qiao.server import serve  # late: it starts the engine

        status = serve(parsed.setup)
    except QiaoError as error:
        print(f"qiao: error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    raise SystemExit(status)


if __name__ == "__main__":
    main()
