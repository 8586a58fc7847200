"""Name the operators that a file may not call, since they believe what they are given.

Both readers of programs from files hold to this list: PyTorch has no check of its own behind these
names, so that a size or an index that a file states is read or written where it points.
"""

# Of libraries of one processor, which believe the sizes and packed bytes that they are given: host
# passes call them on the machine that runs a program, so no program in a file does.
_OF_ONE_MACHINE = (
    *("ipu.onednn_", "aten.mkldnn_", "aten._mkldnn_", "aten.to_mkldnn"),
    *("aten.fbgemm_", "aten._weight_int4pack_", "aten._dyn_quant_", "aten.quantized_"),
)
_LAYOUTS = ("sparse", "nested")  # programs have no such tensors; indices and offsets go unchecked
# They exchange the memory of a tensor, which a program knows the layout of.
_REBINDING = frozenset(
    {
        "set_",
        "set",
        "resize_",
        "resize",
        "resize_as_",
        "resize_as_sparse_",
        "as_strided_",
        "set_data",
    }
)


def unchecked(name: str) -> str | None:
    """Why no program in a file calls an operator, such as `aten.add.Tensor`; None if one may."""
    namespace, _, rest = name.partition(".")
    packet = rest.partition(".")[0]
    if packet in _REBINDING:
        return "exchanges the memory of a tensor"
    if name.startswith(_OF_ONE_MACHINE):
        return "is of a library of one machine, which believes the sizes that it is given"
    for layout in _LAYOUTS:
        if namespace == "aten" and layout in packet:
            return f"is one of {layout} tensors, which programs do not have"
    return None
