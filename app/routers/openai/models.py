"""`/v1/models`: what is served here."""

from fastapi import APIRouter, HTTPException

from app.domain.errors import NotFound
from app.openai.models import DefaultSampling, Model, ModelList
from app.routers.dependencies import Services, ServicesDep
from app.routers.openai.call import check_model
from app.routers.openai.route import OpenAIRoute, openai_errors

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)


@router.get("/v1/models", operation_id="listModels", responses=openai_errors())
async def list_models(services: ServicesDep) -> ModelList:
    """The served models."""
    return ModelList(data=[_model(services)])


@router.get("/v1/models/{model:path}", operation_id="getModel", responses=openai_errors(404))
async def get_model(model: str, services: ServicesDep) -> Model:
    """One served model. Its name may hold slashes."""
    if not model:
        raise HTTPException(NotFound.status)  # what any other path that ends in a slash gets
    check_model(services, model)
    return _model(services)


def _model(services: Services) -> Model:
    info = services.info
    return Model(
        id=info.name,
        created=services.started_at,
        max_model_len=info.max_model_len,
        layers=info.num_layers,
        hidden_size=info.hidden_size,
        default_sampling=DefaultSampling.model_validate(services.sampling),
    )
