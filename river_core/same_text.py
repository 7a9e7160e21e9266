"""Same text for every lane: each is fed the backbone's tokens, so that what differs is the method and not the text it wrote.

Two modes. "same-text": every lane leaves by its own rule. "same-exits": the depths that River chose are replayed in every strategy that can, so that the KV
strategy is all that differs. Per position the trace gets top-1 agreement and KL divergence, and at the end, per layer, how far keys and values are from the
backbone's.
"""

import torch

from river_core.errors import InputError
from river_core.exit_rules import ExitRule
from river_core.kv_cache import KVCache
from river_core.trace import rounded


class Follow(ExitRule):
    """The depths of a leading lane, step by step, as it makes them."""

    name = "follow"

    def __init__(self, depths: dict[int, int], leader: str):
        self.depths = depths
        self.leader = leader

    def forced_depth(self, index):
        if index not in self.depths:
            raise InputError("The lane whose exits this one follows has ended.")
        return self.depths[index]

    def describe(self):
        return {"name": self.name, "leader": self.leader}


def check(methods, same_exits: bool) -> None:
    """InputError unless these methods can be compared on one text."""
    names = [method.method for method in methods]
    if "backbone" not in names:
        raise InputError("Comparing on the same text needs the backbone lane, whose text it is.")
    if same_exits and "river" not in names:
        raise InputError("Comparing on the same exits needs the River lane, whose exits they are.")
    for method in methods:
        if not method.kind.feedable:
            raise InputError(
                f"{method.label} makes its own tokens and cannot be fed another lane's; leave it out or let the lanes run freely."
            )


def order(methods) -> list:
    """Backbone first, then River, then the others: each step needs what those before it made."""
    rank = {"backbone": 0, "river": 1}
    return sorted(methods, key=lambda method: rank.get(method.method, 2))


def agreement(own: torch.Tensor, reference: torch.Tensor) -> dict:
    """How one step's scores compare with the backbone's on the same text.

    Args:
        own, reference: logits [V].

    Returns:
        choice: the token that this lane would have taken. agrees: whether that is the backbone's. kl: KL(backbone || lane) in nats.
    """
    p, q = reference.log_softmax(-1), own.log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum())
    choice = int(own.argmax())
    return {"choice": choice, "agrees": choice == int(reference.argmax()), "kl": rounded(max(kl, 0.0), 6)}


def kv_fidelity(cache: KVCache, reference: KVCache, start: int, stop: int) -> dict:
    """How far a lane's keys and values are from the backbone's, slot by slot.

    Args:
        cache, reference: the lane's cache and the backbone's, fed the same tokens.
        start, stop: positions compared (those of the answer; the prompt is the same in all).

    Returns:
        start; k_cos, v_cos, k_err, v_err: per position a list over layers: cosine over all heads, and relative error ||x - y|| / ||y||. An empty slot counts as a
        vector of zeros: cosine 0, error 1. holes: empty slots among those compared. mean: the four figures over all slots.
    """
    layers = len(cache.owner)
    rows = {name: [] for name in ("k_cos", "v_cos", "k_err", "v_err")}
    holes, totals = 0, dict.fromkeys(rows, 0.0)
    for position in range(start, stop):
        slots = [cache.at(layer, position) for layer in range(layers)]
        holes += sum(slot is None for slot in slots)
        truth = torch.stack([reference.at(layer, position) for layer in range(layers)]).float().flatten(2)  # [L, 2, heads * head_dim]
        held = torch.stack([torch.zeros_like(t) if s is None else s.float().flatten(1) for s, t in zip(slots, truth, strict=True)])
        cosine = torch.cosine_similarity(held, truth, dim=-1)
        error = (held - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-12)
        for which, letter in enumerate("kv"):
            for name, values in ((f"{letter}_cos", cosine[:, which]), (f"{letter}_err", error[:, which])):
                rows[name].append([rounded(value, 4) for value in values.tolist()])
                totals[name] += float(values.double().mean())
    count = max(stop - start, 1)
    return {"start": start, **rows, "holes": holes, "mean": {name: rounded(total / count, 6) for name, total in totals.items()}}


def same_text(lanes, shared, stop):
    """The lanes' events, in step: the backbone decodes a token, then every other lane is fed the same one.

    Args:
        lanes: `Lane`s in the order of `order`; the first is the backbone's.
        shared: `SharedPrefill`.
        stop: callable () -> bool.
    """
    backbone, followers = lanes[0], list(lanes[1:])
    reason = "finished"
    for lane in lanes:
        if stop():
            reason = "stop"
            break
        if not backbone.failed:
            yield from lane.guarded(lane.prefill, shared, None if lane is backbone else backbone)
    if stop():  # while the last of them was reading, perhaps
        reason = "stop"
    while not backbone.finished and reason == "finished":
        if stop():
            reason = "stop"
            break
        yield from backbone.guarded(backbone.step)
        for lane in followers:
            if not lane.failed and not backbone.failed:
                yield from lane.guarded(lane.follow, backbone)
    for lane in lanes:
        if lane.failed:
            continue
        if backbone.failed:
            yield from lane.fail(f"The lane {backbone.method.label}, whose text this one reads, has failed.")
            continue
        if lane is not backbone and lane.token_ids:
            events = lane.guarded(lambda lane=lane: [lane.fidelity(backbone)])
            yield from events
            if lane.failed:
                continue
        yield lane.end("stop" if reason == "stop" else backbone.finished)
    yield {"type": "done", "reason": reason}
