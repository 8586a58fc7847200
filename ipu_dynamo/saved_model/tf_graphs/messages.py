"""Declare the messages of TensorFlow that are read, as data in a pool of our own.

There is no generated code, so none that has to fit the installed protobuf, and no clash with a
TensorFlow in the same process. Fields that are not here are skipped. Maps are lists of entries.
Source: tensorflow/core/protobuf and tensorflow/core/framework, `*.proto`.
"""

from functools import cache
from typing import Any

_EXTRA = "run pip install '.[saved-model]' in the checkout"

# message: field: (number, type); `*` in front means that it is repeated
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Dim": {"size": (1, "int64")},
    "Shape": {"dim": (2, "*Dim"), "unknown_rank": (3, "bool")},
    "Tensor": {
        "dtype": (1, "int32"),
        "shape": (2, "Shape"),
        "tensor_content": (4, "bytes"),
        "half_val": (13, "*int32"),
        "float_val": (5, "*float"),
        "double_val": (6, "*double"),
        "int_val": (7, "*int32"),
        "string_val": (8, "*bytes"),
        "int64_val": (10, "*int64"),
        "bool_val": (11, "*bool"),
        "uint32_val": (16, "*uint32"),
        "uint64_val": (17, "*uint64"),
    },
    "AttrList": {
        "s": (2, "*bytes"),
        "i": (3, "*int64"),
        "f": (4, "*float"),
        "b": (5, "*bool"),
        "type": (6, "*int32"),
        "shape": (7, "*Shape"),
    },
    "NameAttrList": {"name": (1, "string"), "attr": (2, "*AttrEntry")},
    "Attr": {
        "list": (1, "AttrList"),
        "s": (2, "bytes"),
        "i": (3, "int64"),
        "f": (4, "float"),
        "b": (5, "bool"),
        "type": (6, "int32"),
        "shape": (7, "Shape"),
        "tensor": (8, "Tensor"),
        "func": (10, "NameAttrList"),
    },
    "AttrEntry": {"key": (1, "string"), "value": (2, "Attr")},
    "Node": {
        "name": (1, "string"),
        "op": (2, "string"),
        "input": (3, "*string"),
        "attr": (5, "*AttrEntry"),
    },
    "ArgDef": {"name": (1, "string"), "type": (3, "int32")},
    "OpDef": {"name": (1, "string"), "input_arg": (2, "*ArgDef"), "output_arg": (3, "*ArgDef")},
    "TextEntry": {"key": (1, "string"), "value": (2, "string")},
    "Function": {
        "signature": (1, "OpDef"),
        "node_def": (3, "*Node"),
        "ret": (4, "*TextEntry"),
    },
    "Library": {"function": (1, "*Function")},
    "Graph": {"node": (1, "*Node"), "library": (2, "Library")},
    "MetaInfo": {"tags": (4, "*string")},
    "TensorInfo": {"name": (1, "string"), "dtype": (2, "int32"), "shape": (3, "Shape")},
    "TensorInfoEntry": {"key": (1, "string"), "value": (2, "TensorInfo")},
    "Signature": {
        "inputs": (1, "*TensorInfoEntry"),
        "outputs": (2, "*TensorInfoEntry"),
        "method_name": (3, "string"),
    },
    "SignatureEntry": {"key": (1, "string"), "value": (2, "Signature")},
    "MetaGraph": {
        "meta_info": (1, "MetaInfo"),
        "graph": (2, "Graph"),
        "signatures": (5, "*SignatureEntry"),
    },
    "SavedModel": {"schema_version": (1, "int64"), "meta_graphs": (2, "*MetaGraph")},
    "BundleHeader": {"num_shards": (1, "int32"), "endianness": (2, "int32")},
    "Slice": {},
    "BundleEntry": {
        "dtype": (1, "int32"),
        "shape": (2, "Shape"),
        "shard_id": (3, "int32"),
        "offset": (4, "int64"),
        "size": (5, "int64"),
        "crc32c": (6, "fixed32"),
        "slices": (7, "*Slice"),
    },
    "ObjectAttribute": {"full_name": (2, "string"), "key": (3, "string")},
    "TrackedObject": {"attributes": (2, "*ObjectAttribute")},
    "ObjectGraph": {"nodes": (1, "*TrackedObject")},
}


@cache
def _classes() -> dict[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError(
            f"SavedModels of TensorFlow are read with protobuf, of the extra saved-model: {_EXTRA}"
        ) from error
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="ipu_dynamo/saved_model.proto", package="ipu_dynamo.saved_model", syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            plain = kind.removeprefix("*")
            entry = message.field.add(name=key, number=number)
            entry.label = field.LABEL_REPEATED if kind[0] == "*" else field.LABEL_OPTIONAL
            if plain in _MESSAGES:
                entry.type = field.TYPE_MESSAGE
                entry.type_name = f".ipu_dynamo.saved_model.{plain}"
            else:
                entry.type = getattr(field, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    find = pool.FindMessageTypeByName
    return {
        name: message_factory.GetMessageClass(find(f"ipu_dynamo.saved_model.{name}"))
        for name in _MESSAGES
    }


def parse_message(name: str, content: bytes, source: str) -> Any:
    """A message of this name from its bytes.

    Raises:
        ValueError: the bytes are not a message of this kind; `source` is named.
        ImportError: protobuf is not installed.
    """
    message = _classes()[name]()
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise ValueError(f"{source}: damaged: no {name} ({error})") from error
    return message
