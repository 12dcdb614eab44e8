"""The head of a Ray cluster that a run is to join: found, and asked with a deadline whether it is one.

Ray itself tries for many minutes where somebody listens who is no head, and prints its own lines meanwhile.
"""

from __future__ import annotations

import os
import socket
import ssl
import time

from ray._common.utils import get_ray_address_file
from ray._private import services, utils

from qfleet.core.errors import ConfigError

_ANSWER_S = 5.0
"""How long the way to a head may take."""
_GREET_S = 15.0
"""How long a head may take to say that it is there: on a busy machine it has to wait for its turn."""
_SETTINGS = 4
"""The kind of frame by which both sides of gRPC begin, which Ray speaks."""
_FRAME = 9
"""Bytes of a frame's head; its kind is the fourth."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_SOURCE = "RAY_ADDRESS"


def find_head(address: str) -> str:
    """Return the address of the head that answers at `address`, or of the one that 'auto' means.

    Raises ConfigError where none answers.
    """
    if address != "auto":
        require_head(address, "")
        return address
    try:
        found: str = services.get_ray_address_from_environment(address, None)
    except ConnectionError as error:
        raise ConfigError(
            "--address auto finds no Ray cluster on this machine: start one (`ray start --head`), or leave --address"
            " out for this machine alone"
        ) from error
    require_head(found, _source(found))
    return found


def _source(found: str) -> str:
    """Return from where Ray has the address that 'auto' means."""
    if os.environ.get(_SOURCE):
        return f", where --address auto leads by the variable {_SOURCE}"
    if found == utils.read_ray_address():
        return f", where --address auto leads by the file {get_ray_address_file(None)}"
    return ", where --address auto leads by a gcs_server of this machine"


def require_head(address: str, source: str) -> None:
    """Raise ConfigError unless a head answers there; `source` says from where the address is."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"address {address}{source} is of Ray's client: run qfleet on a node of the cluster, with --address"
            " HOST:PORT of its head"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():  # Ray knows at once what to think of it
        return
    try:
        trouble = _trouble(host.strip("[]"), int(port))
    except (OSError, OverflowError, UnicodeError) as error:
        trouble = str(error)
    if trouble:
        raise ConfigError(
            f"no Ray cluster answers at {address}{source} ({trouble}): is its head running (`ray start --head --port"
            f" {port}`), and can this machine reach it? Leave --address out for this machine alone"
        )


def _trouble(host: str, port: int) -> str:
    """Return what speaks against a head there; empty if somebody greets as Ray does."""
    with socket.create_connection((host, port), _ANSWER_S) as plain:
        plain.settimeout(_GREET_S)
        with _secured(plain) as line:
            line.sendall(_GREETING)
            try:
                head = _answer(line)
            except TimeoutError:
                return f"somebody listens there, but says nothing within {_GREET_S:g} s"
    if len(head) < _FRAME or head[3] != _SETTINGS:
        return "somebody listens there who does not speak as Ray does"
    return ""


def _answer(line: socket.socket) -> bytes:
    """Return the first bytes that come, fewer than a frame's head if the line is closed before."""
    head, until = b"", time.monotonic() + _GREET_S
    while len(head) < _FRAME:
        line.settimeout(max(0.01, until - time.monotonic()))
        more = line.recv(_FRAME - len(head))
        if not more:
            break
        head += more
    return head


def _secured(line: socket.socket) -> socket.socket:
    """Return what to speak over: the line itself, or TLS with the certificates that Ray would use.

    Whose certificate the other side has is for Ray to judge: nothing is told here that is worth hiding.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return line
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if (certificate := os.environ.get("RAY_TLS_SERVER_CERT")) and (key := os.environ.get("RAY_TLS_SERVER_KEY")):
        context.load_cert_chain(certificate, key)
    return context.wrap_socket(line)
