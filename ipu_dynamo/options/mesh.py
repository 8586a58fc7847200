"""Check the mesh of ranks that run one program together."""

from typing import TYPE_CHECKING

from ipu_dynamo.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICA, IPU = "replica", "ipu"  # the names that dimensions of a mesh may have
_EXAMPLE = 'init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ipu"))'


def read_mesh(given: object) -> "DeviceMesh | None":
    """Return a mesh, or None if it has one rank: that is a program without a mesh.

    Raises:
        OptionError: it is no mesh of CPUs with dimensions `replica` and `ipu`, or lacks this rank.
    """
    from torch.distributed.device_mesh import DeviceMesh  # slow, and only ranks need it

    if not isinstance(given, DeviceMesh):
        raise OptionError(
            f"option mesh is {given!r}, a {type(given).__name__}\n"
            f"  try:  a DeviceMesh, such as {_EXAMPLE}, or None"
        )
    if given.device_type != "cpu":
        raise OptionError(
            f"option mesh is of device type {given.device_type}, and ranks run programs on CPUs\n"
            f"  try:  {_EXAMPLE}"
        )
    names = given.mesh_dim_names or ()
    if not names or len({*names}) < len(names) or not {*names} <= {REPLICA, IPU}:
        called = f"are called {', '.join(names)}" if names else "have no names"
        raise OptionError(
            f"option mesh has dimensions of {' x '.join(map(str, given.shape))} ranks, which "
            f"{called}; one may be called replica, and one ipu\n"
            f"  try:  {_EXAMPLE}"
        )
    if given.get_coordinate() is None:
        raise OptionError(
            f"option mesh has the ranks {given.mesh.flatten().tolist()}, and this process is rank "
            f"{given.get_rank()}\n"
            "  try:  compile this program on ranks of the mesh only"
        )
    return given if given.size() > 1 else None


def mesh_shape(mesh: "DeviceMesh") -> tuple[int, int]:
    """Into how many blocks a mesh cuts the replicas, and into how many the IPUs."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return sizes.get(REPLICA, 1), sizes.get(IPU, 1)
