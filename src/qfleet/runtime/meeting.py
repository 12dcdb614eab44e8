"""Where the ranks of a group meet that are on several nodes: a store of torch's, on the driver's node.

Torch neither encrypts what it sends nor asks who somebody is: this is for networks where nobody else is.
"""

from __future__ import annotations

import socket
from typing import Any

from torch import distributed

from qfleet.core.errors import ConfigError


class MeetingPlace:
    """A store that listens on one address of this machine, for as long as somebody holds this."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"ranks of other nodes cannot meet at {host}, this node's address as Ray knows it ({error}): start Ray"
                " here with --node-ip-address, or set parallel.across_nodes to False"
            ) from error
        port = listening.getsockname()[1]
        # Torch itself would listen on all addresses.
        self._store: Any = distributed.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.address = f"store://{host}:{port}"
