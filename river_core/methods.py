"""Methods by name: an exit rule together with a KV strategy, as users pick them.

A method is written NAME[@RULE][:VALUE][+OPTION=VALUE ...], for example "river", "river:0.95", "masking@fixed:12", "recompute@margin:0.4+cap=8", "verified+k=4".
VALUE is the rule's threshold, or its depth for the rule "fixed". Rules that test take the options floor=4 (shallowest exit) and layers=5/10/20 (allowed exits); the rule "replay" takes
depths=6/3/5, one for every token from the prompt's on (the last one holds). A method takes only the rules that act in it, and a rule only what it reads: everything
else is an InputError, so that no label names what does not act.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from river_core.errors import InputError
from river_core.exit_rules import Entropy, ExitRule, Fixed, Margin, MaxProbability, Never, Replay, Similarity, check_tau
from river_core.strategies import Strategy
from river_core.strategies.masking import MaskingStrategy
from river_core.strategies.monotone import MonotoneStrategy, SkipDecodeStrategy
from river_core.strategies.propagation import PropagationStrategy
from river_core.strategies.recompute import RecomputeStrategy, TokenReplayStrategy
from river_core.strategies.river import RiverStrategy
from river_core.strategies.sequence import SequenceStrategy
from river_core.strategies.verified import VerifiedStrategy

UNTRAINED_HEAD = "Answers from the LM head on a state that this model was never trained for, so expect poor text."


@dataclass(frozen=True)
class Kind:
    """A row of `METHODS`: what a name stands for.

    rules: names of the rules that it takes, the default first. options: option name -> parser. leaves_through_head: the answer comes from the exit state.
    follows: in same-exits mode the rule gives way to River's depths. feedable: may be fed another lane's text.
    """

    label: str
    note: str
    strategy: type[Strategy]
    rules: tuple[str, ...] = ("similarity", "maxprob", "margin", "entropy", "fixed", "replay", "never")
    options: dict[str, Callable] = field(default_factory=dict)
    leaves_through_head: bool = False
    follows: bool = False
    feedable: bool = True


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{text[:20]!r} is not a whole number.") from None


def _count(text: str) -> int:
    number = _whole(text)
    if number < 0:
        raise InputError(f"{text[:20]!r} is no count: whole numbers from 0 on are.")
    return number


METHODS = {
    "backbone": Kind("Backbone", "Every token runs every layer in full precision.", RiverStrategy, ("never",)),
    "int4": Kind("Full {bits}-bit", "Every generated token runs the quantised twins only; the prompt as in every lane.", RiverStrategy, ("depth 0",)),
    "river": Kind("River", "Leaves the backbone once a layer changes the state little, and goes on through the {bits}-bit twins.", RiverStrategy),
    "masking": Kind("KV masking", "Skipped slots stay empty, and later tokens do not see them.", MaskingStrategy, leaves_through_head=True, follows=True),
    "recompute": Kind(
        "Recompute", "Exited tokens wait, and run their missing layers together with a later token.", RecomputeStrategy,
        options={"cap": _count}, leaves_through_head=True, follows=True,
    ),
    "replay": Kind(
        "Recompute, token replay", "As EE-LLM publishes it: incomplete tokens are fed again from the embedding.", TokenReplayStrategy,
        options={"cap": _count}, leaves_through_head=True, follows=True,
    ),
    "propagation": Kind("State propagation", "Skipped layers get keys and values projected from the exit state.", PropagationStrategy, leaves_through_head=True, follows=True),
    "monotone": Kind("Monotone exit", "No token goes deeper than the one before it.", MonotoneStrategy, leaves_through_head=True, follows=True),
    "skipdecode": Kind(
        "SkipDecode schedule", "The number of layers falls with the position; lower-middle layers are skipped.", SkipDecodeStrategy, ("never",),
        options={"n_min": _whole, "n_max": _whole, "warm_up": _whole, "horizon": _whole}, leaves_through_head=True,
    ),
    "sequence": Kind(
        "Sequence-level exit", "One depth for prompt and answer.", SequenceStrategy,
        ("similarity", "maxprob", "margin", "entropy", "fixed", "never"),
        options={"depth": _whole, "head": str}, leaves_through_head=True,
    ),
    "verified": Kind(
        "River, verified", "The river drafts, the backbone checks in one pass; the text is the backbone's, near ties in 16 bits apart.", VerifiedStrategy, ("never",),
        options={"k": _count}, feedable=False,
    ),
}  # fmt: skip


def _layer_list(text: str) -> list[int]:
    return [_whole(part) for part in text.split("/")]


# Options of the rules that test, beside those of the strategies.
RULE_OPTIONS = {"floor": _whole, "layers": _layer_list}
REPLAY_OPTIONS = {"depths": _layer_list}
TESTING = ("similarity", "maxprob", "margin", "entropy")

# rule name: (default value, or None = the model's; maker from (model, value, options of the rule)). The last three take no value.
RULES = {
    "similarity": (None, lambda model, value, options: Similarity(value, **options)),
    "maxprob": (0.8, lambda model, value, options: _head_rule(MaxProbability, model, value, options)),
    "margin": (0.5, lambda model, value, options: _head_rule(Margin, model, value, options)),
    "entropy": (0.7, lambda model, value, options: _head_rule(Entropy, model, value, options)),
    "fixed": (None, lambda model, value, options: Fixed(value)),
    "replay": (None, lambda model, value, options: Replay(options["depths"])),
    "never": (None, lambda model, value, options: Never(model.config.num_hidden_layers)),
    "depth 0": (None, lambda model, value, options: Fixed(0)),
}


def _head_rule(rule, model, value, options):
    return rule(model.decoder, value, **({"layers": head_layers(model)} | options))


def head_layers(model) -> list[int]:
    """The depths at which rules that need the LM head may test: a quarter, a half and three quarters."""
    layers = model.config.num_hidden_layers
    return sorted({max(1, layers // 4), max(1, layers // 2), max(1, 3 * layers // 4)} - {layers})


def _check_depths(options: dict, layers: int) -> None:
    allowed, floor = options.get("layers"), options.get("floor")
    depths = (allowed or []) + ([] if floor is None else [floor])
    if any(not 0 <= depth <= layers for depth in options.get("depths", [])):
        raise InputError(f"Depths to replay are 0 to {layers} in this model.")
    if any(not 1 <= depth < layers for depth in depths):
        raise InputError(f"Exit depths are 1 to {layers - 1} in this model; the last layer is no exit.")
    if allowed and floor is not None and max(allowed) < floor:
        raise InputError(f"None of the allowed exits {'/'.join(map(str, allowed))} lies at or beyond the floor of {floor}.")


def _depth(model, value) -> int:
    layers = model.config.num_hidden_layers
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= layers or number != int(number):
        raise InputError(f"A fixed exit depth is a whole number from 0 to {layers}, not {str(value)[:20]!r}.")
    return int(number)


@dataclass(frozen=True)
class Method:
    """What one lane runs.

    id: unique in a run. method: the name in `METHODS`. label, note: for people; plain_label: without the rule, for a lane whose rule gives way to another.
    rule: as a trace carries it. options: of the strategy.
    make_rule: () -> a fresh rule; build: (model, rule or None) -> a fresh strategy, with state of its own.
    """

    id: str
    method: str
    label: str
    plain_label: str
    note: str
    rule: dict
    options: dict
    kind: Kind
    make_rule: Callable[[], ExitRule]

    def build(self, model, rule: ExitRule | None = None) -> Strategy:
        """A strategy for one lane; `rule` replaces the method's own."""
        return self.kind.strategy(model, rule or self.make_rule(), **self.options)

    def describe(self) -> dict:
        """The lane's entry in a trace header."""
        return {
            "id": self.id,
            "method": self.method,
            "label": self.label,
            "rule": self.rule,
            "options": self.options,
            "note": self.note,
            "untrained_head": self.kind.leaves_through_head,
        }


def parse_methods(names, tau, model) -> list[Method]:
    """Methods from their names.

    Args:
        names: for example ("backbone", "int4", "river:0.95"); see the top of this file.
        tau: similarity threshold of lanes that carry none; None = the model's default.
        model: the `Model`.

    Raises:
        InputError: no name, an unknown one, or a value that cannot be used.
    """
    tau = model.default_tau if tau is None else check_tau(tau)
    if isinstance(names, str) or not names:
        raise InputError("Switch on at least one lane.")
    methods: list[Method] = []
    for text in names:
        taken = [method.method for method in methods]
        methods.append(_parse(str(text).strip(), tau, model, taken))
    return methods


def _parse(text: str, tau: float, model, taken: list[str]) -> Method:
    head, *pairs = text.split("+")
    head, colon, value = head.partition(":")
    name, at, rule_name = head.partition("@")
    if name not in METHODS:
        raise InputError(f"There is no method {name[:40]!r}; choose from {', '.join(METHODS)}.")
    kind = METHODS[name]
    rule_name = _rule_name(name, kind, rule_name if at else None)
    for_rule = RULE_OPTIONS if rule_name in TESTING else REPLAY_OPTIONS if rule_name == "replay" else {}
    options, rule_options = _options(name, kind, for_rule, pairs)
    _check_depths(rule_options, model.config.num_hidden_layers)
    if kind.strategy is SequenceStrategy and "depth" in options:
        if at or colon or rule_options:
            raise InputError(f"The method {name} takes either a depth or an exit rule that finds one, not both; leave one of them out.")
        # The depth is the decision; what a rule would have found is never asked.
        maker, number = (lambda model, value, options: Fixed(value)), options["depth"]
    else:
        number = _value(name, rule_name, value if colon else None, tau, model)
        maker = RULES[rule_name][1]
    if rule_name == "replay" and "depths" not in rule_options:
        raise InputError(f"The rule replay needs the depths that it replays, such as {name}@replay+depths=6/3/5.")
    bits = model.plan.bits
    label = kind.label.format(bits=bits)
    named = [{"similarity": "tau"}.get(rule_name, rule_name) + ("" if number is None else f" {number:g}")] if colon or at else []
    own, rules_own = ([f"{option} {_shown(given)}" for option, given in some.items()] for some in (options, rule_options))
    method = Method(
        id=name if name not in taken else f"{name}-{taken.count(name) + 1}",
        method=name,
        label=", ".join([label, *named, *own, *rules_own]),
        plain_label=", ".join([label, *own]),
        note=" ".join([kind.note.format(bits=bits)] + [UNTRAINED_HEAD] * kind.leaves_through_head),
        rule=maker(model, number, rule_options).describe(),
        options=options,
        kind=kind,
        make_rule=lambda: maker(model, number, rule_options),
    )
    method.build(model)  # options out of range are an input error now, not a failed lane later
    return method


def _rule_name(name: str, kind: Kind, given: str | None) -> str:
    """The rule of a method; `given` is what was written behind the @, None = nothing."""
    if given is None:
        return kind.rules[0]
    if given not in RULES or " " in given:
        raise InputError(f"There is no exit rule {given[:40]!r}; choose from {', '.join(rule for rule in RULES if ' ' not in rule)}.")
    if given in kind.rules:
        return given
    if len(kind.rules) == 1:
        raise InputError(f"The method {name} has no exit rule to choose: its depths are its own. Leave @{given} and its value out.")
    raise InputError(f"The method {name} does not take the exit rule {given}; choose from {', '.join(kind.rules)}.")


def _options(name: str, kind: Kind, for_rule: dict, pairs: list[str]) -> tuple[dict, dict]:
    """The options of the strategy and those of the rule, from parts such as "cap=8"."""
    options: dict = {}
    rule_options: dict = {}
    for pair in pairs:
        option, equals, given = pair.partition("=")
        if option in options or option in rule_options:
            raise InputError(f"The method {name} has its option {option!r} twice; give it once.")
        if option in kind.options and equals:
            options[option] = kind.options[option](given)
        elif option in for_rule and equals:
            rule_options[option] = for_rule[option](given)
        else:
            known = ", ".join([*kind.options, *for_rule]) or "none"
            raise InputError(f"The method {name} has no option {pair[:40]!r}; its options are: {known}.")
    return options, rule_options


def _value(name: str, rule_name: str, given: str | None, tau: float, model) -> float | int | None:
    """What the rule compares or where it leaves, None if it has no value; `given` is what was written behind the colon, None = nothing."""
    if rule_name == "fixed":
        return _depth(model, model.config.num_hidden_layers // 2 if given is None else given)
    if rule_name in TESTING:
        default = RULES[rule_name][0]
        return check_tau(given) if given is not None else tau if default is None else default
    if given is not None:
        raise InputError(
            f"{given[:20]!r} means nothing to the method {name}{'@replay' * (rule_name == 'replay')}, which takes no value; leave it out."
        )
    return None


def _shown(given) -> str:
    return "/".join(map(str, given)) if isinstance(given, list) else str(given)
