"""Name the operators that a file may not call, since they do not check their arguments.

Both readers of programs from files use this list. PyTorch does not check sizes and indices for
these operators, so a wrong one in a file would read or write memory out of bounds.
"""

# Operators of libraries for one processor, which trust sizes and packed bytes. Only host passes
# insert them, on the machine that runs a program, so a program in a file does not call them.
_OF_ONE_MACHINE = (
    *("ipu.onednn_", "aten.mkldnn_", "aten._mkldnn_", "aten.to_mkldnn"),
    *("aten.fbgemm_", "aten._weight_int4pack_", "aten._dyn_quant_", "aten.quantized_"),
)
_LAYOUTS = ("sparse", "nested")  # not in programs; PyTorch does not check indices and offsets
# They exchange the memory of a tensor, but a program relies on its layout.
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
