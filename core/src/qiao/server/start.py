"""The first steps of a server, in the order that gets it ready soonest.

An engine takes longest, so the first one's process is started before this one imports the HTTP side, which takes about
as long as the engine's own imports. Nothing here may import much.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable

from qiao.errors import ParameterError
from qiao.observability.logs import configure_logging
from qiao.server.args import ServerArgs
from qiao.server.setup import Setup
from qiao.transport.priority import run_when_idle
from qiao.transport.process import HostOptions, launch

logger = logging.getLogger(__name__)


def serve(setup: Setup, options: HostOptions | None = None) -> int:
    """Load the models, serve them, and return the exit status once a signal has ended it.

    Raises a ``QiaoError`` when the server cannot start: a wrong argument or model, a port in use, a refused plan.
    """
    server = setup.server
    configure_logging(server.uvicorn_log_level, json_lines=server.log_json)
    run_when_idle()
    if server.keys is not None:
        from qiao.tenants.keys import KeyStore

        KeyStore(server.keys).check()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server's loop reads the keys again at one
    if server.responses_db not in ("memory", "off"):
        from qiao.server.responses.store import Bounds, ResponseStore

        ResponseStore(server.responses_db, Bounds(1, 1.0, 1)).close()  # before loading, as with the port
    options = options or HostOptions(log_level=server.uvicorn_log_level, log_json=server.log_json)
    check_tls(server)
    listener = bind(server)  # before loading: a port in use should not cost minutes
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)  # until the server's loop handles them
    local = next((model.engine for model in setup.models if not model.server.engine), None)
    engine = launch(local, options) if local is not None else None
    try:
        gc.disable()  # what is imported stays, and need not be looked at while it comes
        from qiao.server.lifecycle import run

        gc.freeze()
        gc.enable()
        return run(setup, options, listener, engine)
    finally:
        if engine is not None:
            engine.process.kill()
        listener.close()
        if server.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(server.uds)


def _stop(number: int, frame: object) -> None:
    logger.info("stopped while loading")
    raise SystemExit(0)


def check_tls(server: ServerArgs) -> None:
    """Raises ``ParameterError`` for files that the server could not use once its models are loaded."""
    if server.ssl_certfile is None or server.ssl_keyfile is None:
        return
    cert, context = server.ssl_certfile, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key_hint = ", without a passphrase, and the key of the first certificate in --ssl-certfile"
    steps: list[tuple[str, str | None, Callable[[str], object], str]] = [
        ("--ssl-certfile", cert, lambda path: open(path, "rb").close(), ""),
        # without a password OpenSSL would ask the terminal for one
        ("--ssl-keyfile", server.ssl_keyfile, lambda path: context.load_cert_chain(cert, path, lambda: ""), key_hint),
        ("--ssl-ca-certs", server.ssl_ca_certs, context.load_verify_locations, ""),
    ]
    for flag, path, use, hint in steps:
        try:
            if path is not None:
                use(path)
        except OSError as error:  # SSLError is one
            reason = getattr(error, "reason", None) or error.strerror
            raise ParameterError(flag, f"cannot use {path}: {reason}; it must be PEM{hint}") from None


def free_after_end(listener: socket.socket) -> None:
    """To be called before ``listen``: connections that it closes will not keep the port from the next server."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def bind(server: ServerArgs) -> socket.socket:
    """A bound socket that does not listen yet, so that connections are refused until the model is loaded.

    Raises ``ParameterError`` for an address that cannot be had.
    """
    if server.uds is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(server.uds)
        except OSError as error:
            listener.close()
            raise ParameterError(
                "--uds",
                f"cannot bind {server.uds}: {error.strerror}; remove the file if no server uses it, or choose another",
            ) from None
        return listener
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            listener.bind((server.host, server.port))  # so that of two that load at once the second is refused now
        except OSError:  # perhaps connections of a server that has just ended linger
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((server.host, server.port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ParameterError(
            "--port", f"cannot bind {server.host}:{server.port} ({reason}); choose another port or host"
        ) from None
    return listener
