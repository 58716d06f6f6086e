"""What `leyden plan` says: the largest micro-batch, and the cheapest change of a config that fits into a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leyden.hardware.memory import format_gib
from leyden.hardware.plan import SHARDED
from leyden.runs.plan import MAX_CHEAP_PARTS, Planner, Way


@dataclass(frozen=True)
class Advice:
    """What fits.

    Attributes:
        largest_micro_batch_size: that fits with the config's own precision and strategy; None where none does.
        overrides: to type, so that it fits; empty where the config fits, None where nothing does.
        text: the same in words.
        way: with these overrides; None where nothing fits.
    """

    largest_micro_batch_size: int | None
    overrides: list[str] | None
    text: list[str]
    way: Way | None


def advise(planner: Planner) -> Advice:
    """Finds the largest micro-batch and the cheapest change, each measured by its own step."""
    own, budget = planner.own, planner.budget
    assert budget is not None
    local = planner.local_batch(own.strategy)
    largest = planner.largest(own)
    text = [f"{budget.describe()}."]
    if largest is not None:
        whole = f", the whole batch{' of a device' if own.strategy != 'auto' else ''}" if largest == local else ""
        text.append(
            f"The largest micro-batch that fits with engine.precision={own.precision} and hardware.strategy="
            f"{own.strategy}: {largest} of {local} samples{whole}."
        )
    if planner.row(own).fits:
        return Advice(largest, [], [*text, "The config fits as it is."], own)
    for way, reason in changes(planner, largest):
        if not planner.row(way).fits:
            continue
        overrides = overrides_of(planner, way)
        text.append(f"The config does not fit. The cheapest change that does: {' '.join(overrides)} ({reason}).")
        if planner.engine.micro_batch_size == "auto" and way == replace(own, micro_batch_size=way.micro_batch_size):
            text.append("engine.micro_batch_size=auto would come to such parts too, by running out of memory first.")
        return Advice(largest, overrides, text, way)
    return Advice(largest, None, [*text, *nothing_fits(planner)], None)


def changes(planner: Planner, largest: int | None) -> Iterator[tuple[Way, str]]:
    """Ways that fit, the cheapest first, and what each costs.

    Cheap are parts of a batch as long as they are few: the result and nearly the time stay. Then computing activations
    again, which costs a third of the time; then another number format, which changes results.
    """
    own = planner.own
    if largest is not None and _parts(planner, own, largest) <= MAX_CHEAP_PARTS:
        yield _cut(planner, own, largest), _cost(planner, own, largest)
    recomputes = planner.has_blocks and not own.activation_checkpointing
    mixed = own.precision in ("32-true", "64-true")
    ways: list[tuple[Way, str]] = []
    if recomputes:
        ways.append((replace(own, activation_checkpointing=True), "about a third more time, the same result"))
    if mixed:
        ways.append((replace(own, precision="bf16-mixed"), "another number format, so other digits"))
    if recomputes and mixed:
        ways.append((replace(own, activation_checkpointing=True, precision="bf16-mixed"), "more time, other digits"))
    found = [(way, reason, planner.largest(way)) for way, reason in ways]
    for most in (MAX_CHEAP_PARTS, None):
        if most is None and largest is not None:
            yield _cut(planner, own, largest), _cost(planner, own, largest)
        for way, reason, size in found:
            if size is not None and (most is None or _parts(planner, way, size) <= most):
                cut = _cut(planner, way, size)
                parts = _parts(planner, way, size)
                yield cut, f"{reason}; the batch in {parts} parts" if parts > 1 else reason
    half = replace(own, precision="bf16-true", activation_checkpointing=own.activation_checkpointing or recomputes)
    if own.precision != "bf16-true" and (size := planner.largest(half)) is not None:
        yield _cut(planner, half, size), "the whole network in bfloat16, where small updates get lost"
    for name in SHARDED:
        way = replace(own, strategy=name)
        shares = name != own.strategy and planner.can_be(way)
        if shares and (size := planner.largest(way)) is not None:
            yield _cut(planner, way, size), f"{planner.layouts[name].num_devices} devices that share the weights"


def _parts(planner: Planner, way: Way, size: int) -> int:
    return -(-planner.local_batch(way.strategy) // size)


def _cut(planner: Planner, way: Way, size: int) -> Way:
    """A way with as few parts as a size allows, made equal: smaller parts, and no more of them."""
    equal = -(-planner.local_batch(way.strategy) // _parts(planner, way, size))
    return replace(way, micro_batch_size=max(equal, planner.smallest(way.strategy)))


def _cost(planner: Planner, way: Way, size: int) -> str:
    parts = _parts(planner, way, size)
    many = ", so small that a device waits for the host" if parts > MAX_CHEAP_PARTS else ""
    return f"the batch in {parts} parts{many}; the same result"


def overrides_of(planner: Planner, way: Way) -> list[str]:
    """What to type for a way, beside the config's own."""
    own, local = planner.own, planner.local_batch(way.strategy)
    found = []
    if way.activation_checkpointing != own.activation_checkpointing:
        found.append(f"engine.activation_checkpointing={str(way.activation_checkpointing).lower()}")
    if way.precision != own.precision:
        found.append(f"engine.precision={way.precision}")
    if way.strategy != own.strategy:
        layout = planner.layouts[way.strategy]
        found += [f"hardware.strategy={way.strategy}", f"hardware.devices={layout.num_devices}"]
        if layout.data_parallel_size > 1 and layout.tensor_parallel_size > 1:
            found.append(f"hardware.tensor_parallel_size={layout.tensor_parallel_size}")
    if way.micro_batch_size < local and way.micro_batch_size != planner.engine.micro_batch_size:
        found.append(f"engine.micro_batch_size={way.micro_batch_size}")
    elif way.micro_batch_size >= local and isinstance(planner.engine.micro_batch_size, int):
        found.append("engine.micro_batch_size=null")
    return found


def nothing_fits(planner: Planner) -> list[str]:
    """Why nothing fits, and what would help."""
    size = planner.smallest(planner.own.strategy)
    smallest = planner.memory(replace(planner.own, micro_batch_size=size))
    weights = smallest.parameters + smallest.gradients + smallest.optimizer_state + smallest.average
    helps = ["a smaller network (model.net.*)"]
    if smallest.optimizer_state > smallest.parameters:
        helps.append("an optimiser with less state (optim=sgd)")
    if smallest.average:
        helps.append("no average of the weights (engine.ema_decay=null)")
    if smallest.resident:
        helps.append("data.residency=host")
    if smallest.batch > smallest.activations:
        helps.append("a smaller data.batch_size")
    return [
        f"Nothing fits, even {size} sample(s) at a time: {format_gib(smallest.total)} are needed, of which "
        f"{format_gib(weights)} are for weights, gradients and optimiser. What would help: {', '.join(helps)}, or a "
        "device with more memory."
    ]
