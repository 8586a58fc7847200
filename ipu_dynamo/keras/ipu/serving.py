"""Offer `ipu.serving.export_keras`, which writes a model as a saved program."""

from typing import Any

from ipu_dynamo.keras.ipu.not_offered import not_offered


def export_keras(model: Any, export_dir: Any, batch_size: int | None = None, **options: Any) -> Any:
    """Write an extended model for serving: the model's own `export_for_ipu_serving`.

    Args:
        model: an extended one.
        export_dir: as for `export_for_ipu_serving`.
        batch_size: as for `export_for_ipu_serving`.
        options: other arguments of `export_for_ipu_serving`.

    Raises:
        TypeError: the model is not extended.
    """
    export = getattr(model, "export_for_ipu_serving", None)
    if export is None:
        raise TypeError(
            f"{getattr(model, 'name', model)!r} is no extended model: make it in a strategy's "
            "scope, or call ipu_dynamo.keras.extend(model)"
        )
    return export(export_dir, batch_size=batch_size, **options)


__getattr__ = not_offered("ipu.serving")
