"""How turns are sampled where their clients do not say it."""

import logging
from dataclasses import asdict

from pydantic import ValidationError

from app.domain.values import NEUTRAL, SamplingDefaults
from app.model_store.errors import BrokenModel
from app.model_store.generation import generation_file, read_generation
from app.model_store.resolve import ResolvedModel
from app.web.errors.field_schema import schema_of
from app.web.errors.problems import describe_problem
from app.wire.turns import SamplingFields

logger = logging.getLogger(__name__)


def sampling_defaults(model: ResolvedModel, generation_config: str) -> SamplingDefaults:
    """As the setting of that name says: `none` is neutral; `auto` is as the model's file says, and where that says
    nothing, as the catalogue does. Raises `BrokenModel` for a file with a value that no client may give.
    """
    if generation_config == "none":
        return NEUTRAL
    path = generation_file(model)
    entries = {} if path is None else read_generation(path)
    said = {name: entries[name] for name in asdict(NEUTRAL) if entries.get(name) is not None}
    try:
        fields = SamplingFields.model_validate(said)
    except ValidationError as error:
        problem = error.errors()[0]
        field, words = describe_problem(schema_of(SamplingFields), dict(problem), problem["loc"])
        raise BrokenModel(
            f"{path}: {field}: {words}; correct it, or start with generation_config none", param="generation_config"
        ) from error
    found = fields.sampling(model.sampling)
    changed = {name: value for name, value in asdict(found).items() if value != getattr(NEUTRAL, name)}
    if changed:
        told = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        logger.info("defaults of sampling from the model: %s", told)
    return found
