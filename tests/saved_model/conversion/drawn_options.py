"""Draw valid combinations of a conversion's options, for the nodes of a program."""

import json
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import SymInt, Tensor

from ipu_dynamo.saved_model.conversion.drafts.from_exported import from_exported
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, gives_tensor
from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.exported.node_names import Kind

Options = dict[str, Any]


def exactly(names: Collection[str]) -> list[str]:
    """Expressions of these nodes and no others."""
    return [f"^{re.escape(name)}$" for name in names]


class Drawn:
    """Options for one signature.

    Args:
        embeds: whether options may ask for an executable.
        fixed: the number of rows of the inputs is.
        work: a folder for solution files and profiles.
    """

    def __init__(
        self,
        source: Path,
        tags: Sequence[str],
        key: str,
        work: Path,
        *,
        embeds: bool = False,
        fixed: bool = False,
    ) -> None:
        with SavedPrograms(source).signature(tags, key) as signature:
            draft = from_exported(signature)
        self._tensors = {g.name for g in draft.groups() if g.kind is Kind.PARAM}
        self._groups = [g for g in draft.groups() if g.is_matched and not g.is_size]
        self._outputs = {g.name for g in self._groups if g.value in draft.outputs.values()}
        self._work, self._embeds, self._fixed = work, embeds, fixed
        self.names = [group.name for group in self._groups]

    def alone(self, rng: random.Random) -> Iterator[Options]:
        """Every option by itself, or with the options that it needs."""
        few = exactly(rng.sample(self.names, min(len(self.names), 4)))
        yield {}
        yield {"excluded_nodes": few[:1]}
        yield {"remove_excluded_nodes": True}
        yield {"no_ipu_placement": True}
        yield {"merge_subgraphs": True}
        yield {"num_ipus": 2}
        yield {"num_ipus": 2, "manual_sharding": [["."], few]}
        for kind in ("matmul", "conv"):
            yield {f"{kind}_partial_type": "half"}
            yield {f"{kind}_amp": 0.3}
        yield {"batch_size": 2}
        yield {"batch_per_step": 3}
        yield {"precision_mode": "FP16"}
        yield {"precision_mode": "FP32"}
        yield {"precision_conversion_excluded_nodes": few[:2]}
        yield {"int64_to_int32_conversion": True}
        if gelu := self._gelus():
            yield gelu
        if self._embeds:
            yield self._embedded(rng)
            for converter in ("auto", "manual", "load"):
                options = self._embedded(rng)
                yield options | self._pipeline(rng, converter, self.names)

    def combination(self, rng: random.Random) -> Options:
        """Some options together."""
        options: Options = {}
        host = self._head(rng) if rng.random() < 0.5 else set[str]()
        if rng.random() < 0.5 and (gelu := self._gelus()) and not host:
            options |= gelu
        if rng.random() < 0.6:
            options["precision_mode"] = rng.choice(["FP16", "FP16", "FP32"])
        if rng.random() < 0.3:
            few = rng.sample(self.names, min(len(self.names), 3))
            options["precision_conversion_excluded_nodes"] = exactly(few)
        for kind in ("matmul", "conv"):
            if rng.random() < 0.3:
                options[f"{kind}_partial_type"] = rng.choice(["half", "float"])
            if rng.random() < 0.1:
                options[f"{kind}_amp"] = rng.choice([0.0, 0.3, 1.0])
        if rng.random() < 0.5:
            options["int64_to_int32_conversion"] = True
        if rng.random() < 0.3:
            options["batch_per_step"] = rng.randint(0, 3)
        if host:
            options["excluded_nodes"] = exactly(sorted(host))
        if self._embeds and rng.random() < 0.5 and (self._fixed or self._gives_rows(host)):
            return options | self._embedded_more(rng, options, host)
        if not host and rng.random() < 0.2:
            return options | {"no_ipu_placement": True, "num_ipus": rng.randint(1, 4)}
        if not host and rng.random() < 0.4:  # anywhere: partitions alternate
            excluded = rng.sample(self.names, min(len(self.names) - 1, 3))
            options["excluded_nodes"] = exactly(excluded)
        elif rng.random() < 0.5:
            options["merge_subgraphs"] = True
        if rng.random() < 0.5:
            options |= self._sharding(rng)
        return options

    def _embedded_more(
        self, rng: random.Random, options: Options, host: Collection[str]
    ) -> Options:
        more = self._embedded(rng)
        on_ipu = [name for name in self.names if name not in host]
        if rng.random() < 0.3:
            return more | self._sharding(rng)
        if rng.random() < 0.6 and len(on_ipu) >= 4:
            # the nodes that a GELU takes the place of are not known to files and expressions
            kinds = ["auto"] if "gelu_replacement" in options else ["auto", "manual", "load"]
            return more | self._pipeline(rng, rng.choice(kinds), on_ipu)
        return more

    def _embedded(self, rng: random.Random) -> Options:
        options: Options = {
            "int64_to_int32_conversion": True,
            "embedded_runtime_save_config": {
                "embedded_runtime_exec_cachedir": "cache",
                "runtime_api_timeout_us": 5000,
            },
        }
        if not self._fixed:
            options["batch_size"] = rng.randint(1, 3)
        return options

    def _sharding(self, rng: random.Random) -> Options:
        count = rng.randint(1, 3)
        lists = [exactly(rng.sample(self.names, rng.randint(0, 4) % len(self.names)))
                 for _ in range(count)]  # fmt: skip
        return {"num_ipus": count, "manual_sharding": lists}

    def _pipeline(self, rng: random.Random, converter: str, on_ipu: Sequence[str]) -> Options:
        """Stages are parts of the nodes in the order of data."""
        if converter == "auto":
            config: Options = {"converter": "auto", "priority": rng.choice(["cycle", "memory"])}
            return {"pipeline_cfg": config | self._folders(rng)}
        count = rng.randint(1, min(4, len(on_ipu)))
        cuts = sorted(rng.sample(range(1, len(on_ipu)), count - 1))
        parts = [on_ipu[a:b] for a, b in zip([0, *cuts], [*cuts, len(on_ipu)], strict=True)]
        ipus = self._ipus(rng, parts)
        if converter == "manual":
            config = {
                "converter": "manual",
                "manual_pipeline_config": [exactly(part) for part in parts],
                "device_info": ipus,
                "profiling_enable": rng.random() < 0.5,
            }
            return {"num_ipus": 4, "pipeline_cfg": config | self._folders(rng)}
        path = self._work / f"{rng.randrange(10**9)}.pipeconf"
        stages = {name: stage for stage, part in enumerate(parts) for name in part}
        path.write_text(json.dumps({"device_mapping": ipus, "pipeline_mapping": stages}))
        return {"num_ipus": 4, "pipeline_cfg": {"converter": "load", "solution_path": str(path)}}

    def _ipus(self, rng: random.Random, parts: Sequence[Sequence[str]]) -> list[int]:
        """An IPU of four for each stage; stages that share a parameter have one."""
        read = {g.name: self._tensors & set(g.reads) for g in self._groups}
        shared = [set[str]().union(*(read[name] for name in part)) for part in parts]
        ipus = [rng.randrange(4) for _ in parts]
        for _ in parts:  # what is joined may join others
            for a, names in enumerate(shared):
                for b in range(a):
                    if names & shared[b]:
                        ipus[a] = ipus[b] = min(ipus[a], ipus[b])
        return ipus

    def _folders(self, rng: random.Random) -> Options:
        return {
            "solution_dir": str(self._work / f"solution{rng.randrange(10**9)}"),
            "profiling_root_dir": str(self._work / "profiles"),
        }

    def _head(self, rng: random.Random) -> set[str]:
        """A node of the first half, and all that it depends on."""
        by_name: Mapping[str, NodeGroup] = {group.name: group for group in self._groups}
        todo = [rng.choice(self.names[: max(1, len(self.names) // 2)])]
        head: set[str] = set()
        while todo:
            name = todo.pop()
            if name in by_name and name not in head:
                head.add(name)
                todo += by_name[name].reads
        return head if any(gives_tensor(g) for g in self._groups if g.name not in head) else set()

    def _gives_rows(self, head: set[str]) -> bool:
        """Whether all that others read of these nodes has in front the rows that calls choose."""
        read = {n for g in self._groups if g.name not in head for n in g.reads}
        edges = [g for g in self._groups if g.name in head & read]
        values = [node.meta["val"] for group in edges for node in group.nodes]
        shapes = [value.shape for value in values if isinstance(value, Tensor)]
        return all(len(shape) and isinstance(shape[0], SymInt) for shape in shapes)

    def _gelus(self) -> Options:
        """The replacement of every GELU that is one node, if there are some."""
        gelus = [g for g in self._groups if g.operator == "aten.gelu.default"]
        names = {group.name for group in gelus}
        if not gelus or names & self._outputs:
            return {}
        return {
            "gelu_replacement": {
                "nodes": exactly(sorted(names)),
                "node_as_gelu_input": exactly(sorted({n for g in gelus for n in g.reads})),
                "node_use_gelu_output": exactly(
                    sorted({g.name for g in self._groups if names & set(g.reads)})
                ),
            }
        }
