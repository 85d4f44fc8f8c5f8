"""The figures as tables of text."""

from collections.abc import Callable, Iterator

from loadgen.experiments.kv.answers import Answers
from loadgen.experiments.kv.codecs import Compression
from loadgen.experiments.kv.fp8 import Fp8Error
from loadgen.experiments.kv.payoff import Payoff, break_even
from loadgen.experiments.kv.report import Findings, TargetReport
from loadgen.experiments.kv.structure import Structure
from loadgen.results.tables import Mark, TextTable
from loadgen.results.text import in_bytes, in_seconds, in_speed

SENT_TOKENS = (1024, 8192, 32768, 131072)


def structure_table(structure: Structure) -> TextTable:
    """What a token's KV is made of."""
    agrees = "yes" if structure.agrees else "NO"
    rows = [
        ("model", structure.model, "/v1/models"),
        ("longest context", f"{structure.max_model_len:,} tokens", "/v1/models"),
        ("layers", f"{structure.layers}", "/v1/models"),
        ("KV heads", f"{structure.kv_heads}", "exported session"),
        ("head size", f"{structure.head_dim}", "exported session"),
        ("element", f"{structure.dtype}, {structure.element_bytes} bytes", "exported session"),
        ("bytes per token", f"{structure.bytes_per_token:,}", "layers x 2 x heads x size x bytes"),
        ("block", f"{structure.block_tokens} tokens, {in_bytes(structure.block_bytes)}", "/v1/memory"),
        ("server and file agree", agrees, "on the bytes and the shape of a block"),
        ("exported session", f"{structure.computed_tokens:,} tokens, {in_bytes(structure.file_bytes)}", "its file"),
    ]
    return TextTable(
        "What KV is made of", ("", "found", "read from"), rows, text_columns=3, marks={"NO": Mark.BAD, "yes": Mark.GOOD}
    )


def growth_table(target: TargetReport, structure: Structure) -> TextTable:
    """How a session grows, and how many fit."""
    rows = [
        (
            f"{row.tokens:,}" + ("" if row.tokens <= structure.max_model_len else " *"),
            in_bytes(row.bytes),
            f"{row.on_device:,}",
            f"{row.on_host:,}",
        )
        for row in target.growth
    ]
    tiers = f"Device {in_bytes(structure.device_bytes)}, host {in_bytes(structure.host_bytes)}."
    beyond = target.growth[-1].tokens > structure.max_model_len
    note = f"{tiers} * longer than this model's context." if beyond else tiers
    header = ("tokens", "KV of one session", "sessions on the device", "sessions on the host")
    return TextTable("How a session grows", header, rows, note)


def transfer_table(target: TargetReport, structure: Structure) -> TextTable:
    """How long sessions of some lengths take over each link."""
    rows = [
        (
            link.name,
            "measured" if link.measured else "nominal",
            in_speed(link.bytes_per_s),
            *(in_seconds(link.seconds(structure.session_bytes(tokens))) for tokens in SENT_TOKENS),
        )
        for link in target.links
    ]
    header = ("link", "speed is", "speed", *(f"{tokens:,} tokens" for tokens in SENT_TOKENS))
    note = "Bytes over speed: neither latency nor protocol is in nominal links."
    return TextTable("How long a session takes to move", header, rows, note, text_columns=2)


def codec_table(findings: Findings) -> TextTable:
    """How small KV becomes, how fast, and on which links that pays."""
    rows = [_codec_row(found) for found in findings.compressions]
    header = ("codec", "", "smaller", "packs", "unpacks", "pays below, in turn", "pays below, pipelined")
    note = "One thread of the CPU. Speeds are of bytes before packing; the last two columns are speeds of a link."
    return TextTable("Making it smaller", header, rows, note, text_columns=2)


def _codec_row(found: Compression) -> tuple[str, ...]:
    limit = break_even(found)
    return (
        found.codec,
        "lossless" if found.lossless else "lossy",
        f"{found.ratio:.2f}x",
        in_speed(found.pack_bytes_per_s),
        in_speed(found.unpack_bytes_per_s),
        *(in_speed(speed) if speed else "never" for speed in (limit.in_turn, limit.pipelined)),
    )


def payoff_tables(target: TargetReport) -> Iterator[TextTable]:
    """How many times faster each codec makes each link."""
    yield _payoff_table(
        target, "Faster or slower, one step after the other", "Pack all, send all, unpack all.", lambda p: p.in_turn_s
    )
    yield _payoff_table(
        target,
        "Faster or slower, pipelined",
        "The three at once, piece by piece: the slowest decides. Filling the pipeline is left out.",
        lambda p: p.pipelined_s,
    )


def _payoff_table(target: TargetReport, title: str, note: str, seconds: Callable[[Payoff], float]) -> TextTable:
    codecs = list(dict.fromkeys(payoff.codec for payoff in target.payoffs))
    gains = {(payoff.link, payoff.codec): payoff.plain_s / seconds(payoff) for payoff in target.payoffs}
    plain = {payoff.link: payoff.plain_s for payoff in target.payoffs}
    rows = [
        (link.name, in_seconds(plain[link.name]), *(_gain(gains[link.name, codec]) for codec in codecs))
        for link in target.links
    ]
    marks = {_gain(gain): Mark.GOOD for gain in gains.values() if round(gain, 2) > 1}
    return TextTable(title, ("link", "as it is", *codecs), rows, note, marks=marks)


def _gain(gain: float) -> str:
    return f"{gain:.2f}x" if gain >= 0.01 else "<0.01x"


def fp8_table(error: Fp8Error, answers: Answers | None) -> TextTable:
    """What is lost with fp8."""
    rows = [
        (
            name,
            f"{half.relative:.2%}",
            f"{max(half.layers):.2%}",
            f"{half.layers.index(max(half.layers))}",
            f"{half.clipped:.4%}",
            f"{half.zeroed:.4%}",
        )
        for name, half in (("keys", error.keys), ("values", error.values))
    ]
    header = ("", "relative error", "worst layer", "which is", "clipped at 448", "became zero")
    note = "Relative error: length of the error over length of the values (L2)."
    if answers is not None:
        note += f" Tokens that the session said with such KV as with its own: {answers.same} of {len(answers.exact)}."
    return TextTable("What fp8 loses", header, rows, note)
