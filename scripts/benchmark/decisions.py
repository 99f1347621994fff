"""What a GPU minute decides: numbers that were measured beside their thresholds, one line a decision.

A decision holds for the compute capability that it was measured on, and for no other. It says what should become the
default there; nothing is changed by it. What was not measured, or is no number, decides nothing.
"""

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

from measured import NEAR, Numbers


class Condition(NamedTuple):
    """A number of some measurements, their mean where there are several, and where it must lie."""

    what: str
    keys: tuple[str, ...]  # of measurements
    field: str
    unit: str
    least: float = -math.inf
    most: float = math.inf
    over: tuple[tuple[str, ...], ...] = ()  # what it would replace, each as `keys`: then a share of their least

    def number(self, found: dict[str, Numbers]) -> float:
        """Raises ValueError, which says why there is none."""
        own = self._mean(self.keys, found)
        if not self.over:
            return own

        others, failures = [], []
        for keys in self.over:
            try:
                others.append(self._mean(keys, found))
            except ValueError as error:
                failures.append(str(error))
        if not others:
            raise ValueError(failures[0])
        if min(others) == 0.0:
            raise ValueError(f"{self.keys[0]} is compared with what took no time")
        return own / min(others)

    def _mean(self, keys: tuple[str, ...], found: dict[str, Numbers]) -> float:
        return fmean(self._one(key, found) for key in keys)

    def _one(self, key: str, found: dict[str, Numbers]) -> float:
        record = found.get(key)
        if record is None:
            raise ValueError(f"{key} was not measured")
        if "error" in record:
            raise ValueError(f"{key} failed: {record['error']}")
        number = record.get(self.field)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
            raise ValueError(f"{key} has no {self.field} that counts: {number!r:.40}")
        return float(number)

    @property
    def threshold(self) -> str:
        """In words."""
        if self.least > -math.inf and self.most < math.inf:
            return f"{self.least:,g} to {self.most:,g}"
        return f"at least {self.least:,g}" if self.most == math.inf else f"at most {self.most:,g}"


class Decision(NamedTuple):
    """It is yes where all conditions hold."""

    name: str
    conditions: tuple[Condition, ...]
    yes: str
    no: str
    settings: tuple[str, ...] = ()  # keys of train that it is about, as `steps.py --set` takes them
    beside: tuple[
        tuple[str, str], ...
    ] = ()  # measurements and their fields that are printed, too: what it would replace


def decide(decision: Decision, found: dict[str, Numbers], *, card: str | None, capability: str | None) -> Numbers:
    """The record of a decision, `line` included; its verdict is yes, no or undecided."""
    numbers, parts, holds = {}, [], []
    record: dict[str, Any] = {"card": card, "capability": capability}
    try:
        for condition in decision.conditions:
            number = condition.number(found)
            numbers[condition.what] = number
            holds.append(condition.least <= number <= condition.most)
            parts.append(f"{condition.what} {number:,.4g} {condition.unit} ({condition.threshold})")
    except ValueError as error:
        line = f"{decision.name}: undecided: {error}"
        return record | {"verdict": "undecided", "numbers": numbers, "line": line}

    verdict = "yes" if all(holds) else "no"
    meaning = decision.yes if all(holds) else decision.no
    others = {f"{key.partition('/')[2]} {field}": found.get(key, {}).get(field) for key, field in decision.beside}
    beside = {what: number for what, number in others.items() if isinstance(number, float)}
    if beside:
        parts.append("beside " + ", ".join(f"{what} {number:,.4g}" for what, number in beside.items()))
    where = f"on compute capability {capability} alone" if capability else "but this is no GPU"
    line = f"{decision.name}: {', '.join(parts)}: {verdict}: {meaning}, {where}"
    return record | {
        "verdict": verdict,
        "numbers": numbers,
        "beside": beside,
        "thresholds": {condition.what: condition.threshold for condition in decision.conditions},
        "line": line,
    }


def decided(
    decisions: tuple[Decision, ...], found: dict[str, Numbers], *, card: str | None, capability: str | None
) -> Iterator[tuple[str, Numbers]]:
    """Each decision's record, under its name, where it differs from the one that is known."""
    for decision in decisions:
        key = f"decision/{decision.name}"
        record = {"name": key} | decide(decision, found, card=card, capability=capability)
        if record != found.get(key):
            yield key, record


def winners(decisions: tuple[Decision, ...], found: dict[str, Numbers]) -> list[str]:
    """The settings of those decisions that are yes; of several values of a key, that of the first."""
    won: dict[str, str] = {}
    for decision in decisions:
        if found.get(f"decision/{decision.name}", {}).get("verdict") == "yes":
            for setting in decision.settings:
                won.setdefault(setting.partition("=")[0], setting)
    return list(won.values())


# ---- of `gpu.sh minute`: what each part of it is for


BASE = "steps/base/25000/packed-compiled-graphs"
BEST = "steps/best"

SHARE, FASTER = "of the fastest other's", 0.9  # a new default must save a tenth: the same twice differs by less
ROLES = ("encoder", "causal", "cross")
AS_MOST = "short_attention/900"  # a step with as many sentences as WMT's have
NORM = "add_norm/25088x512"
INDUCTOR = ("inductor", "inductor_no_mix_order", "inductor_split_size", "inductor_autotune", "inductor_all")
LOSS = "loss/25088/512"
SEARCH = "decode/base/beam4-131072"
LARGER = "decode/base/beam4-524288"


def attention_by(kernel: str) -> tuple[str, ...]:
    """Its measurements in all roles, without dropout."""
    return tuple(f"{AS_MOST}/{role}/{kernel}/0.0" for role in ROLES)


MINUTE = (
    Decision(
        "card",
        (
            Condition("a large product", ("facts/anchors",), "product_tflops", "TFLOP/s", least=740, most=830),
            Condition("a large copy", ("facts/anchors",), "copy_tb_s", "TB/s", least=4.0, most=4.6),
        ),
        "the machine is as fast as the H200 of the first figures",
        "another machine: compare with this call's baseline, and with no earlier figure",
        beside=((BASE, "milliseconds_mean"),),
    ),
    Decision(
        "sentences",
        (
            Condition(
                "both ways",
                attention_by("sentences"),
                "both_ms",
                SHARE,
                most=FASTER,
                over=(attention_by("varlen"), attention_by("triton")),
            ),
        ),
        "attention by whole sentences is the default",
        "it stays off",
        ("kernels=fused",),
        tuple((f"{AS_MOST}/encoder/{form}", "both_ms") for form in ("sentences/0.0", "sentences/0.1", "varlen/0.0")),
    ),
    Decision(
        "norm",
        (
            Condition(
                "both ways",
                (f"{NORM}/kernel",),
                "both_ms",
                SHARE,
                most=FASTER,
                over=tuple((f"{NORM}/{form}",) for form in INDUCTOR),
            ),
        ),
        "residual, dropout and norm in one kernel are the default",
        "the fastest of inductor's switches is",
        ("kernels=fused",),
        tuple((f"{NORM}/{form}", field) for form in ("kernel", *INDUCTOR) for field in ("forward_ms", "backward_ms")),
    ),
    Decision(
        "attention",
        (
            Condition(
                "the three kernels, both ways",
                attention_by("triton"),
                "both_ms",
                SHARE,
                most=FASTER,
                over=(attention_by("varlen"),),
            ),
        ),
        "they are the default where whole sentences are not",
        "torch's kernel stays",
        ("kernels=triton",),
        ((f"{AS_MOST}/encoder/triton/0.0", "both_ms"),),
    ),
    Decision(
        "loss",
        (
            # Compiled, as in a step, torch's takes 1.75 times as long as the products; `ours` is not compiled here.
            Condition(
                "it all", (f"{LOSS}/fused",), "ms", "times the products'", most=1.5, over=((f"{LOSS}/products",),)
            ),
            Condition("its largest error", (f"{LOSS}/errors",), "largest_error", "of the norm", most=NEAR),
        ),
        "Triton's loss is the default",
        "torch's loss stays",
        ("kernels=triton",),
        tuple((f"{LOSS}/{form}", "ms") for form in ("fused", "ours", "products")),
    ),
    Decision(
        "million",
        (Condition("with what has won", (BEST,), "target_tokens_per_second", "tokens/s", least=1e6),),
        "base trains at a million tokens a second",
        "the profile says what is left",
    ),
    Decision(
        "search",
        (
            Condition("replayed", (f"{SEARCH}/replayed",), "seconds", SHARE, most=FASTER, over=((SEARCH,),)),
            Condition(
                "the first time, with recordings",
                (f"{SEARCH}/replayed",),
                "first_pass_seconds",
                SHARE,
                most=1.0,
                over=((SEARCH,),),
            ),
        ),
        "search.cuda_graphs=true is the default",
        "steps of a search are launched",
        beside=((SEARCH, "target_tokens_per_second"), (f"{SEARCH}/replayed", "deviation")),
    ),
    Decision(
        "search_speed",
        (Condition("replayed", (f"{SEARCH}/replayed",), "target_tokens_per_second", "tokens/s", least=150_000),),
        "as fast as was meant",
        "the profile says what is left",
        beside=tuple(
            (f"facts/{name}", "ms")
            for name in ("log_softmax", "search_attention/efficient_attention", "search_attention/math")
        ),
    ),
    Decision(
        "search_batches",
        (
            Condition(
                "batches of 524,288 tokens, replayed",
                (f"{LARGER}/replayed",),
                "seconds",
                SHARE,
                most=FASTER,
                over=((f"{SEARCH}/replayed",),),
            ),
        ),
        "they are the default where steps are replayed",
        "131,072 tokens stay",
        beside=((LARGER, "target_tokens_per_second"), (f"{LARGER}/replayed", "target_tokens_per_second")),
    ),
    Decision(
        "ranks",
        (Condition("not passed", ("tests/ranks",), "not_passed", "tests", most=0),),
        "several GPUs replay by default",
        "several GPUs launch",
    ),
    Decision(
        "big",
        (
            Condition(
                "a step of big",
                ("steps/big/25000/packed-compiled-graphs",),
                "target_tokens_per_second",
                "tokens/s",
                least=314_000,
            ),
        ),
        "41 % of the card's peak, as the best that is published",
        "behind the best that is published",
    ),
    Decision(
        "tests",
        (Condition("not passed", ("tests/minute",), "not_passed", "tests", most=0),),
        "what they test may land",
        "what they test may not land",
    ),
)
SECOND = tuple(
    Decision(
        peer,
        (Condition("ours in its worst round", (f"variants/base/{peer}/ratio",), "least", "times as fast", least=1),),
        "ahead of it",
        "not ahead of it",
    )
    for peer in ("marian", "nn.Transformer-compiled")
)
