"""LangChain and LangGraph: a graph that loops over a tool node, and structured answers in two forms."""

from typing import Any

from agent_tools import MODEL, ORDER, QUESTION, URL, Report, clock, tell, weather
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

TOOLS = [tool(weather), tool(clock)]
model = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=200)


def call_model(state: MessagesState) -> dict[str, Any]:
    """One step, with the tool that it must call."""
    step = sum(message.type == "tool" for message in state["messages"])
    if step < len(ORDER):
        bound = model.bind_tools(TOOLS, tool_choice=ORDER[step])
    else:
        bound = model.bind_tools(TOOLS, tool_choice="none").bind(max_tokens=16)
    return {"messages": [bound.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("model", call_model)
graph.add_node("tools", ToolNode(TOOLS))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
agent = graph.compile(checkpointer=InMemorySaver())

thread: Any = {"configurable": {"thread_id": "1"}}
pieces = [
    piece.content
    for piece, about in agent.stream({"messages": [("user", QUESTION)]}, thread, stream_mode="messages")
    if about["langgraph_node"] == "model"
]
messages = agent.get_state(thread).values["messages"]
structured = [
    model.with_structured_output(Report, method=method).invoke(QUESTION)
    for method in ("json_schema", "function_calling")
]
tell(
    final=messages[-1].content,
    streamed="".join(pieces),
    steps=[message.type for message in messages],
    requests=sum(message.type == "ai" for message in messages),
    structured=[report.model_dump(mode="json") for report in structured],
)
