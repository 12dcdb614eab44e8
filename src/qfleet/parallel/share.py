"""One rank's share of a split network, in a form that can be flattened like a whole network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Share(nn.Module):
    """The tensors that a rank has of a network, as plain ones under numbers, so that `FlatParameters` takes them.

    Once they are flattened, `tie` makes the modules' own tensors views of the same memory.
    """

    names: list[str]
    """Names in the unsplit network: of the parameters, then of the buffers."""

    def __init__(
        self, modules: Iterable[nn.Module], names: dict[int, str], rooms: Mapping[str, torch.Size] | None = None
    ) -> None:
        """Take the modules of this rank, on their device, and the unsplit network's names by tensors' identities.

        A parameter lies at the beginning of a room of such a shape, by name, if it has one.
        """
        super().__init__()
        self._parts = [part for module in modules for part in module.modules()]
        parameters = {id(p): p for part in self._parts for p in part.parameters(recurse=False)}
        buffers = {id(b): b for part in self._parts for b in part.buffers(recurse=False) if id(b) in names}
        self.names = [names[key] for key in (*parameters, *buffers)]
        self._plain: dict[int, nn.Parameter] = {}
        for number, (key, parameter) in enumerate(parameters.items()):
            if isinstance(parameter, DTensor):
                self._plain[key] = parameter = _plain(parameter, (rooms or {}).get(names[key]))
            self.register_parameter(f"parameter{number}", parameter)
        for number, buffer in enumerate(buffers.values()):
            self.register_buffer(f"buffer{number}", buffer)

    def tie(self) -> None:
        """Make the modules' split parameters and their gradients lie where the plain ones do."""
        for part in self._parts:
            for key, parameter in list(part.named_parameters(recurse=False)):
                if id(parameter) in self._plain:
                    setattr(part, key, _tied(cast(DTensor, parameter), self._plain[id(parameter)]))
        self._parts.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the rank's tensors by their names in the unsplit network."""
        return dict(zip(self.names, [*self.parameters(), *self.buffers()], strict=True))


def _plain(split: DTensor, room: torch.Size | None) -> nn.Parameter:
    """Return a copy of a parameter's part on this rank; in a room that it does not fill zeros follow."""
    local = split.to_local().detach()
    plain = local.new_zeros(room or local.shape)
    plain[: len(local)] = local
    return nn.Parameter(plain)


def _tied(split: DTensor, plain: nn.Parameter) -> nn.Parameter:
    """Return a parameter like `split` whose part on this rank, and its gradient, lie in the memory of `plain`.

    Its part is all of its room: where a network is sharded, torch sends equal rooms and leaves out what nobody owns.
    """
    assert plain.grad is not None
    rows = len(split.to_local())
    tied = nn.Parameter(_like(split, plain.detach()))
    tied.grad = _like(split, plain.grad[:rows])
    return tied


def _like(split: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor that is divided like `split` and has `local` on this rank."""
    mesh, placements = split.device_mesh, split.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=split.shape, stride=split.stride())
