"""Timelines that need no ranks: simulated steps, as ranks would have recorded them."""

from megapipe.plan import RankStep, Simulation, Wait


def as_measured(simulation: Simulation, start: float = 0.0, pause: float = 0.0) -> list[RankStep]:
    """A simulated step as ranks would have recorded it: idle time is a wait but for a pause before each action."""
    begin = min(spans[0].start for spans in simulation.spans)
    end = begin + simulation.makespan
    steps = []
    for spans in simulation.spans:
        waits = []
        clock = begin
        for span in spans:
            if span.start - clock > pause:
                waits.append(Wait(span.action, clock + pause, span.start))
            clock = span.end
        waits.append(Wait(None, clock, end))
        steps.append(RankStep(begin, end, spans, waits).moved(start - begin))
    return steps
