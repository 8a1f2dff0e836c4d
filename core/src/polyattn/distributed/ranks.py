"""Meshes as layers see them: the ranks of each dimension, and this process among them."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import InvalidInputError, did_you_mean

__all__ = ["DIMS", "MeshRanks", "Ranks", "init_mesh", "ranks_of"]

DIMS = ("ring", "ulysses")
"""Names of a mesh's dimensions, in the order of ranks: those of one Ulysses group are neighbours."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of one dimension of a mesh. group: None where there is one. index: of this process."""

    group: Any = None
    size: int = 1
    index: int = 0
    _met: set[torch.device] = dataclasses.field(default_factory=set)

    def meet(self, device: torch.device) -> None:
        """All ranks come together once on a device.

        NCCL connects a group at its first transfer, and waits there for every rank of it. A rank without tokens has
        nothing to transfer, and would never come.
        """
        if self.size > 1 and device.type != "cpu" and device not in self._met:
            self.all_reduce(torch.zeros(1, device=device))
            self._met.add(device)

    def peer(self, step: int) -> int:
        """The global rank that is `step` ranks further, round the ring."""
        return int(dist.get_global_rank(self.group, (self.index + step) % self.size))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclasses.dataclass(frozen=True, eq=False)
class MeshRanks:
    """A mesh as a layer sees it. ranks: global ones, ring-major. index: of this process among them."""

    ring: Ranks
    ulysses: Ranks
    ranks: tuple[int, ...]
    index: int

    @property
    def name(self) -> str:
        """Equal on the ranks of one mesh, and on no others."""
        return hashlib.sha256(repr((self.ranks, self.ring.size)).encode()).hexdigest()[:16]


def init_mesh(*, ring: int = 1, ulysses: int = 1, device_type: str | None = None) -> Any:
    """Build the mesh of a `USPAttention` over all ranks of the job.

    Args:
        ring, ulysses: ranks along each dimension; their product is the number of ranks. Neighbours are of one Ulysses
            group, which exchanges more.
        device_type: of torch; None = that of the job's backend.

    Returns:
        A `torch.distributed.DeviceMesh` [ring, ulysses] with dimensions of these names; `mesh["ring"]` and
        `mesh["ulysses"]` are those of the single layers.

    Raises:
        InvalidInputError: no process group, or sizes that do not fit the number of ranks.
    """
    _check_group()
    world = dist.get_world_size()
    for name, size in (("ring", ring), ("ulysses", ulysses)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidInputError(f"{name}={size!r} must be a whole number of ranks, 1 or more")
    if ring * ulysses != world:
        raise InvalidInputError(
            f"ring={ring} times ulysses={ulysses} is {ring * ulysses}, and the job has {world} ranks: choose sizes "
            f"whose product is {world}, or give the layer a slice of a larger mesh, mesh['ring', 'ulysses']"
        )
    if device_type is None:
        device_type = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type  # type: ignore[union-attr,unused-ignore]
    return init_device_mesh(device_type, (ring, ulysses), mesh_dim_names=DIMS)


def ranks_of(mesh: Any, kind: str) -> MeshRanks:
    """The ranks of a mesh for a layer.

    Args:
        kind: "ulysses" or "ring" for a mesh of one dimension, "usp" for one of both.

    Raises:
        InvalidInputError: no process group, no mesh, another number of dimensions, other names, or a mesh that this
            rank is not in.
    """
    _check_group()
    if not isinstance(mesh, DeviceMesh):
        raise InvalidInputError(
            f"mesh is a {type(mesh).__name__}; a torch.distributed.DeviceMesh is needed: "
            "polyattn.distributed.init_mesh(ring=..., ulysses=...) makes one"
        )
    names = tuple(mesh.mesh_dim_names or ())
    shape = tuple(mesh.mesh.shape)
    wanted = DIMS if kind == "usp" else (kind,)
    if len(shape) != len(wanted) or (names and sorted(names) != sorted(wanted)):
        hint = "".join(did_you_mean(name, wanted) for name in names if name not in wanted)
        raise InvalidInputError(
            f"the mesh has dimensions {names or shape} of sizes {shape}; this layer takes {' x '.join(wanted)}: name "
            f"them so, or give it a slice, mesh[{', '.join(map(repr, wanted))}].{hint}"
        )
    if not names and kind == "usp":
        raise InvalidInputError("the mesh has no names; give mesh_dim_names=('ring', 'ulysses')")
    if mesh.get_coordinate() is None:
        raise InvalidInputError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}: build the layer on "
            "the ranks of its mesh only"
        )
    table = mesh.mesh if names != DIMS[::-1] else mesh.mesh.T
    ranks = tuple(int(rank) for rank in table.flatten().tolist())

    def along(name: str) -> Ranks:
        if name not in wanted:
            return Ranks()
        dim = names.index(name) if names else 0
        return Ranks(mesh.get_group(dim), shape[dim], mesh.get_local_rank(dim))

    return MeshRanks(along("ring"), along("ulysses"), ranks, ranks.index(dist.get_rank()))


def _check_group() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInputError(
            "there is no process group here: start the program with `torchrun --nproc-per-node N`, and call "
            "torch.distributed.init_process_group first"
        )
