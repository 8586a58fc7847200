"""Train on one of the ranks of a mesh, and compare with one process: `python -m ...`.

Arguments: a folder where ranks meet, the rank, the mesh as REPLICASxIPUS, and the order of its
dimensions.
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ipu_dynamo import (
    Options,
    Strategy,
    compile_inference,
    compile_training,
    load_checkpoint,
    rows_of_rank,
    save_checkpoint,
)
from tests.ranks.mesh import Pipeline

CALLS = 2


def train(options, rows):
    """The losses of each call, and the model afterwards; ranks begin with other weights."""
    model = Pipeline()
    if options.mesh is not None:
        for parameter in model.parameters():
            parameter.data += dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, options)
    losses = [step(rows_of_rank(x, options)) for x in rows]
    return losses, step, model


def main(folder, rank, shape, *names):
    torch.set_num_threads(1)
    sizes = [int(size) for size in shape.split("x")]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=int(rank),
        world_size=sizes[0] * sizes[1],
    )
    by_name = dict(zip(("replica", "ipu"), sizes, strict=True))
    mesh = init_device_mesh("cpu", [by_name[n] for n in names], mesh_dim_names=names)
    alone = Options(
        engine="eager",
        replicas=2,
        device_iterations=2,
        gradient_accumulation=4,
        output_mode="all",
        strategy=Strategy("pipelined"),
        seed=3,
    )
    options = replace(alone, mesh=mesh)
    rows = torch.randn(CALLS, 2 * 4 * 2 * 3, 4, generator=torch.Generator().manual_seed(1))
    expected, reference, whole = train(alone, rows)
    losses, step, model = train(options, rows)
    for loss, of_all in zip(losses, expected, strict=True):
        assert torch.equal(loss, own_results(of_all, options))
    step.read_weights()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        if by_name["ipu"] == 1:
            assert torch.equal(mine, theirs)
    path = save_checkpoint(f"{folder}/runs", step, {"calls": CALLS})
    _, again, _ = train(options, [])
    assert load_checkpoint(path, again) == {"calls": CALLS}
    loss, of_all = again(rows_of_rank(rows[0], options)), reference(rows[0])
    assert torch.equal(loss, own_results(of_all, options))
    infer = replace(options, output_mode="default", return_period=1)
    if by_name["ipu"] == 1 and int(rank) == 0:  # one rank alone may validate
        program = compile_inference(Pipeline(), infer)
        whole = compile_inference(Pipeline(), replace(infer, mesh=None))
        x = rows[0, :12]
        assert torch.equal(
            program(rows_of_rank(x, infer, training=False)),
            own_results(whole(x), infer),
        )
    print(step.rank_plan)
    dist.barrier()
    dist.destroy_process_group()


def own_results(results, options):
    """Of the results of all replicas, one for each micro-batch, those of this rank's."""
    of_replicas = results.unflatten(0, (-1, options.replicas))
    row, rows = options.mesh.get_local_rank("replica"), options.grid[0]
    return of_replicas.chunk(rows, 1)[row].flatten()


if __name__ == "__main__":
    main(*sys.argv[1:])
