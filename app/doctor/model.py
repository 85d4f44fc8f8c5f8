"""What a model would take of this machine, and how it would run: found out without loading a weight."""

from __future__ import annotations

from app.doctor.findings import Finding, error, ok, warning
from app.domain.errors import DjinnError
from app.domain.values import WeightsDtype
from app.gpu.device.hardware import dtype_name
from app.gpu.models import can_be_streamed
from app.gpu.models.recipe import Recipe
from app.gpu.startup.weights import QUANTIZED, RESIDENT_SHARE, free_bytes, needed_bytes, require_fitting
from app.machine.files import size
from app.model_store.resolve import resolve
from app.model_store.tensors import GgufIndex, is_indexed
from app.model_store.tokenizer import load_tokenizer
from app.settings import Settings

NAME = "model"


def check_model(settings: Settings) -> Finding:
    """One line about `settings.model`. Its tokenizer, and the names and sizes of all its tensors are read; one that is
    fetched or converted first, is.
    """
    try:
        model = resolve(
            settings.model, cache_dir=settings.cache_dir, weights_dtype=WeightsDtype(settings.weights_dtype)
        )
        require_fitting(model)
        load_tokenizer(model)
        quantization, how = getattr(model.config, QUANTIZED, None), "as stored"
        if quantization is not None and model.folder is not None:
            how = str(quantization["quant_method"])
            how += ", kept so" if can_be_streamed(model) else ", dequantized at the start"
        elif model.folder is not None and is_indexed(model.folder):
            how = ", ".join(sorted({each.kind for each in GgufIndex.read(model.folder).tensors.values()}))
        recipe = Recipe.choose(model, settings.engine())
        needed, free = needed_bytes(recipe), free_bytes(recipe.device)
    except DjinnError as failure:
        return error(NAME, failure.message, "use another model, or other settings: docs/models.md")
    layers = "Djinn's own layers" if can_be_streamed(model) else "Transformers' modules"
    said = (
        f"{model.name}: {model.config.model_type} on {layers}, in {dtype_name(recipe.dtype)}; weights ({how}) take "
        f"{size(needed)} of {size(free)} that are free on {recipe.device}"
    )
    if needed <= free * RESIDENT_SHARE:
        return ok(NAME, said)
    if can_be_streamed(model):
        return warning(NAME, f"{said}: they would be streamed", "use a smaller weights_dtype, or docs/weight-ring.md")
    return error(NAME, f"{said}, which is too little", "use a smaller model, or a quantized one of Djinn's own layers")
