"""One rank's share of a split network, in a form that can be flattened like a whole network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Share(nn.Module):
    """The tensors that a rank has of a network, as plain ones under numbers, so that `FlatParameters` takes them.

    Once they are flattened, `tie` makes the modules' own tensors views of the same memory.
    """

    names: list[str]
    """Names in the unsplit network: of the parameters, then of the buffers."""

    def __init__(self, modules: Iterable[nn.Module], names: dict[int, str]) -> None:
        """Take the modules of this rank, on their device, and the unsplit network's names by tensors' identities."""
        super().__init__()
        self._parts = [part for module in modules for part in module.modules()]
        parameters = {id(p): p for part in self._parts for p in part.parameters(recurse=False)}
        buffers = {id(b): b for part in self._parts for b in part.buffers(recurse=False) if id(b) in names}
        self.names = [names[key] for key in (*parameters, *buffers)]
        self._plain: dict[int, nn.Parameter] = {}
        for number, (key, parameter) in enumerate(parameters.items()):
            if isinstance(parameter, DTensor):
                self._plain[key] = parameter = nn.Parameter(parameter.to_local().detach().clone())
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


def _tied(split: DTensor, plain: nn.Parameter) -> nn.Parameter:
    """Return a parameter like `split` whose part on this rank, and its gradient, lie in the memory of `plain`."""
    assert plain.grad is not None
    mesh, placements = split.device_mesh, split.placements
    tied = nn.Parameter(DTensor.from_local(plain.detach(), mesh, placements, run_check=False))
    tied.grad = DTensor.from_local(plain.grad, mesh, placements, run_check=False)
    return tied
