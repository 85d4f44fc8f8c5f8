"""Instructor: structured answers in the modes of tools and of JSON schemas, one that is asked again, one streamed."""

from typing import Any

import instructor
from agent_tools import MODEL, QUESTION, URL, Report, tell
from openai import OpenAI
from pydantic import field_validator

ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 200}
sdk = OpenAI(base_url=URL, api_key="none")
by_tool = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
by_schema = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
attempts: list[int] = []


class DoubtedReport(Report):
    """A report that is refused once: Instructor then sends the call back, with the error as the tool's answer."""

    @field_validator("degrees")
    @classmethod
    def _is_doubted_once(cls, degrees: int) -> int:
        attempts.append(degrees)
        if len(attempts) == 1:
            raise ValueError("look again")
        return degrees


reports = [
    by_tool.chat.completions.create(response_model=Report, **ASKED),
    by_schema.chat.completions.create(response_model=Report, **ASKED),
    by_tool.chat.completions.create(response_model=DoubtedReport, max_retries=2, **ASKED),
    list(by_tool.chat.completions.create_partial(response_model=Report, **ASKED))[-1],
]
tell(structured=[report.model_dump(mode="json") for report in reports], attempts=len(attempts))
