"""`/v1/models`: the models that clients may name, and the adapters that operators load and unload."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.domain.values import ModelInfo
from app.openai.models import DefaultSampling, LoadModelBody, Model, ModelList, UnloadedModel, UnloadModelBody
from app.routers.api_calls import IGNORED_DESCRIPTION, OpenAIRoute, as_model, openai_errors
from app.routers.dependencies import OperatorOnlyDep, Services, ServicesDep, errors
from app.sessions.adapters import ServedAdapter
from app.web.bodies import JsonRoute
from app.web.errors import ANTHROPIC_VERSION

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

ANSWERS = {**openai_errors(404), 200: {"headers": IGNORED_DESCRIPTION}}
LISTED = {**openai_errors(), 200: {"headers": IGNORED_DESCRIPTION}}

operators_router = APIRouter(
    prefix="/v1/models", tags=["system"], route_class=JsonRoute, dependencies=[OperatorOnlyDep]
)


@router.get("/v1/models", operation_id="listModels", response_model=ModelList, responses=LISTED)
async def list_models(request: Request, services: ServicesDep) -> ModelList | Response:
    """The served models. With the header `anthropic-version`, as Anthropic's API lists them."""
    if ANTHROPIC_VERSION in request.headers:
        adapters = [(as_model(services.info, each), each.since) for each in services.sessions.adapters]
        data = [_anthropic_model(*each) for each in ((services.info, services.started_at), *adapters)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return JSONResponse({"data": data, "has_more": False, **ends})
    names = [_model(services, name) for name in services.sessions.adapters.names]
    return ModelList(data=[*names, *(_adapter(services, each) for each in services.sessions.adapters)])


@router.get("/v1/models/{model:path}", operation_id="getModel", response_model=Model, responses=ANSWERS)
async def get_model(model: str, request: Request, services: ServicesDep) -> Model | Response:
    """One served model. Its name may hold slashes. With the header `anthropic-version`, as Anthropic's API has it."""
    found = services.sessions.adapters.get(model)
    if ANTHROPIC_VERSION in request.headers:
        if found is not None:
            return JSONResponse(_anthropic_model(as_model(services.info, found), found.since))
        return JSONResponse(_anthropic_model(services.info, services.started_at))
    return _model(services, model) if found is None else _adapter(services, found)


def _adapter(services: Services, served: ServedAdapter) -> Model:
    """An adapter, as vLLM lists one, without the place of its files: that is the operator's."""
    base = _model(services, served.adapter.name)
    changed = {"created": served.since, "root": served.adapter.digest, "parent": services.info.name}
    return base.model_copy(update=changed)


def _model(services: Services, name: str) -> Model:
    info = services.info
    return Model(
        id=name,
        root=info.name,
        created=services.started_at,
        max_model_len=info.max_model_len,
        layers=info.num_layers,
        hidden_size=info.hidden_size,
        chat_format=services.tool_support.format_name,
        default_sampling=DefaultSampling.model_validate(services.sampling),
    )


def _anthropic_model(info: ModelInfo, loaded_at: int) -> dict[str, Any]:
    """The model as Anthropic's API has it, which the server loaded at `loaded_at`, in Unix seconds."""
    return {
        "type": "model",
        "id": info.name,
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(loaded_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": info.max_model_len,
        "lifecycle": "active",
    }


@operators_router.post("/load", operation_id="loadModel", responses=errors(400, 409, 503))
async def load_model(body: LoadModelBody, services: ServicesDep) -> Model:
    """Load a LoRA adapter, which all tenants may name from then on. Only an operator may."""
    return _adapter(services, await services.sessions.adapters.load(body.name, body.path))


@operators_router.post("/unload", operation_id="unloadModel", responses=errors(400, 404, 409, 503))
async def unload_model(body: UnloadModelBody, services: ServicesDep) -> UnloadedModel:
    """Unload a LoRA adapter that no turn uses. Its sessions stay, and go on once the same files are loaded again. Only
    an operator may.
    """
    await services.sessions.adapters.unload(body.name)
    return UnloadedModel(id=body.name)
