"""Name the function that `torch.compile` asks for its default backend; checked on torch 2.13.0."""

from torch._dynamo.backends import registry as registry

NAME = "get_default_backend"
