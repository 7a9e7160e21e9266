"""Methods by name: an exit rule together with a KV strategy, as users pick them."""

from collections.abc import Callable
from dataclasses import dataclass

from river_core.errors import InputError
from river_core.exit_rules import Fixed, Never, Similarity, check_tau
from river_core.strategies.river import RiverStrategy


@dataclass(frozen=True)
class Method:
    """What one lane runs.

    id: unique in a run. method: the name in `METHODS`. label, note: for people. rule: as a trace carries it.
    build: model -> a fresh strategy, with state of its own.
    """

    id: str
    method: str
    label: str
    note: str
    rule: dict
    build: Callable

    def describe(self) -> dict:
        """The lane's entry in a trace header."""
        return {"id": self.id, "method": self.method, "label": self.label, "rule": self.rule, "note": self.note}


def _backbone(layers, tau):
    return Never(layers)


def _int4(layers, tau):
    return Fixed(0)


def _river(layers, tau):
    return Similarity(tau)


# name: (label, note, rule from (number of layers, tau), strategy class)
METHODS = {
    "backbone": ("Backbone", "Every token runs every layer in full precision.", _backbone, RiverStrategy),
    "int4": ("Full {bits}-bit", "Every generated token runs the quantised twins only; the prompt as in every lane.", _int4, RiverStrategy),
    "river": ("River", "Leaves the backbone once a layer changes the state little, and goes on through the {bits}-bit twins.", _river, RiverStrategy),
}  # fmt: skip


def parse_methods(names, tau, model) -> list[Method]:
    """Methods from their names.

    Args:
        names: for example ("backbone", "int4", "river"); "river:0.95" gives this lane a tau of its own.
        tau: threshold of lanes that carry none; None = the model's default.
        model: the `Model`.

    Raises:
        InputError: no name, an unknown one, or a tau that is not a number.
    """
    tau = model.default_tau if tau is None else check_tau(tau)
    layers, bits = model.config.num_hidden_layers, model.plan.bits
    if isinstance(names, str) or not names:
        raise InputError("Switch on at least one lane.")
    methods: list[Method] = []
    for text in names:
        name, colon, own = str(text).partition(":")
        if name not in METHODS:
            raise InputError(f"There is no method {name[:40]!r}; choose from {', '.join(METHODS)}.")
        label, note, make_rule, strategy = METHODS[name]
        lane_tau = check_tau(own) if colon else tau
        rule = make_rule(layers, lane_tau).describe()
        taken = sum(m.method == name for m in methods)
        label = label.format(bits=bits) + (f", tau {lane_tau:g}" if colon else "")
        methods.append(
            Method(
                id=name if not taken else f"{name}-{taken + 1}",
                method=name,
                label=label,
                note=note.format(bits=bits),
                rule=rule,
                build=_builder(strategy, make_rule, layers, lane_tau),
            )
        )
    return methods


def _builder(strategy, make_rule, layers, tau):
    return lambda model: strategy(model, make_rule(layers, tau))
