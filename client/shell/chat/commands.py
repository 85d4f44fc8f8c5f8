"""The commands between the lines of a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client.breakpoint_models import Pass
from client.shell.chat.conversation import Conversation, Misuse
from client.shell.chat.views import breakpoints_text, edits_text, history_text, lens_view
from client.shell.session_table import kv_bytes
from client.shell.wording import counted, size, turn

PAUSE_LIMIT_S = 3600.0
"""How long a pause waits for someone who reads and thinks."""
GUESSES = 5

Run = Callable[[Conversation, Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class Command:
    """What `/help` says of a command, and what does it. `most` is the number of its words at most."""

    usage: str
    does: str
    run: Run
    most: int = 0


def obey(conversation: Conversation, line: str) -> None:
    """Do what a line that begins with `/` says. Raises `Misuse`, and what the client raises."""
    name, *words = line.split()
    command = COMMANDS.get(name)
    if command is None:
        raise Misuse(f"unknown command {name}; /help lists them. A line that begins with a space is sent as it is")
    if len(words) > command.most:
        raise Misuse(f"usage: {command.usage}")
    command.run(conversation, words)


def _pause(conversation: Conversation, words: Sequence[str]) -> None:
    if not words:
        armed = [each.info for each in conversation.session.breakpoints()]
        conversation.terminal.show(breakpoints_text(armed) or "nothing is armed")
        return
    if words == ["off"]:
        conversation.session.clear_breakpoints()
        return
    layer, once = _number(words[0], COMMANDS["/pause"]), False
    when_pass: Pass | None = None
    for word in words[1:]:
        match word:
            case "once":
                once = True
            case "prefill" | "decode" | "any":
                when_pass = word
            case _:
                raise Misuse(f"usage: {COMMANDS['/pause'].usage}")
    conversation.session.break_at(layer=layer, when_pass=when_pass, once=once, timeout_s=PAUSE_LIMIT_S)
    conversation.terminal.note(f"(pauses after layer {words[0]})")


def _steer(conversation: Conversation, words: Sequence[str]) -> None:
    """`/steer off` leaves what pauses and captures alone."""
    edits = [each for each in conversation.session.breakpoints() if each.info.action == "edit"]
    if not words:
        conversation.terminal.show(edits_text([each.info for each in edits]) or "nothing steers")
    elif words == ["off"]:
        for each in edits:
            each.remove()
    else:
        name, factor, layer = *words, *("1", str(conversation.layers // 2))[len(words) - 1 :]
        try:
            number = float(factor)
        except ValueError:
            raise Misuse(f"{factor} is no number; usage: {COMMANDS['/steer'].usage}") from None
        conversation.session.steer(add=name, factor=number, layer=_number(layer, COMMANDS["/steer"]))
        conversation.terminal.note(f"(adds {number:g} x {name} after layer {layer} from now on)")


def _lens(conversation: Conversation, words: Sequence[str]) -> None:
    guesses = _number(words[0], COMMANDS["/lens"]) if words else GUESSES
    conversation.terminal.show(lens_view(conversation.session.checkpoint().lens(top_k=guesses)))


def _step(conversation: Conversation, words: Sequence[str]) -> None:
    conversation.resume(_number(words[0], COMMANDS["/step"]) if words else "next_token")


def _resume(conversation: Conversation, words: Sequence[str]) -> None:
    if words not in ([], ["end"]):
        raise Misuse(f"usage: {COMMANDS['/resume'].usage}")
    conversation.resume("end" if words else None)


def _cancel(conversation: Conversation, _words: Sequence[str]) -> None:
    conversation.session.cancel()


def _fork(conversation: Conversation, _words: Sequence[str]) -> None:
    left = conversation.fork()
    conversation.terminal.note(f"(now in the fork {conversation.session.id}; /session {left.id} goes back)")


def _rewind(conversation: Conversation, words: Sequence[str]) -> None:
    if not words:
        raise Misuse(f"usage: {COMMANDS['/rewind'].usage}")
    info = conversation.session.rewind(_number(words[0], COMMANDS["/rewind"]))
    conversation.terminal.note(f"({counted(info.tokens, 'token')} left)")


def _history(conversation: Conversation, _words: Sequence[str]) -> None:
    conversation.terminal.show(history_text(conversation.session.history(pieces=True)))


def _session(conversation: Conversation, words: Sequence[str]) -> None:
    if words:
        conversation.session = conversation.find(words[0])
    info = conversation.session.refresh()
    where = f"{size(kv_bytes(info))} of KV, place {info.kv.tier}" if info.kv.tier else "no KV"
    conversation.terminal.show(f"{info.id}: turn {turn(info.state)}, {counted(info.tokens, 'token')}, {where}")


def _help(conversation: Conversation, _words: Sequence[str]) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.does}" for command in COMMANDS.values()]
    conversation.terminal.show("\n".join([*lines, "Ctrl-C cancels the turn that runs. Ctrl-D ends the conversation."]))


def _quit(_conversation: Conversation, _words: Sequence[str]) -> None:
    raise EOFError


def _number(word: str, command: Command) -> int:
    if not word.isdecimal():
        raise Misuse(f"{word} is no number; usage: {command.usage}")
    return int(word)


COMMANDS: dict[str, Command] = {
    command.usage.split()[0]: command
    for command in (
        Command(
            "/pause [LAYER [prefill|decode|any] [once]|off]", "pause turns after a layer; none: list them", _pause, 3
        ),
        Command(
            "/steer [VECTOR [FACTOR [LAYER]]|off]",
            "add a vector to what comes after a layer; none: list them",
            _steer,
            3,
        ),
        Command("/lens [COUNT]", "the likeliest next tokens where the turn is paused", _lens, 1),
        Command("/step [LAYER]", "go on to the same layer of the next token, or to a higher layer", _step, 1),
        Command("/resume [end]", "go on to the next pause, or to the end", _resume, 1),
        Command("/cancel", "end the paused turn", _cancel),
        Command("/fork", "go on in a copy of the session", _fork),
        Command("/rewind POSITION", "drop the history from a position on", _rewind, 1),
        Command("/history", "all tokens as text, and the position of each line", _history),
        Command("/session [ID]", "where the session stands, or go to another", _session, 1),
        Command("/help", "this list", _help),
        Command("/quit", "end the conversation", _quit),
    )
}
