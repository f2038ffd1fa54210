"""Programs side by side on one GPU: what that does to their latency, and which split into lanes meets their targets.

::

    robot = lanes.Tenant("detector.pte", inputs, target_us=500)
    rest = lanes.Tenant("mapper.pte", other_inputs)
    proposal = lanes.propose([robot, rest])
    print(proposal.reason, proposal.sms)

A lane is a stream in a partition of the GPU's multiprocessors (SMs). Lanes keep programs off each other's SMs; memory
bandwidth and caches stay shared, and a program outside every lane uses everybody's SMs. So a split is not trusted before
it was run: what is measured here is measured side by side.

Whether a program stays in its lane at all, with everything that its delegates launch, is what `confinement` looks at::

    print(lanes.confinement(robot, gpu.partition(sms=8)))

Latency is the host's time from a call until its results are there, of one call at a time, with inputs and outputs on the
device where the program has them there. Methods are captured as graphs where they can be. Neighbours keep calls in
flight all the time.
"""

from .confinement import Confinement, confinement, sms_seen
from .latency import Latency, Measured, Tenant, measure, side_by_side
from .picture import plot_curves, plot_side_by_side
from .split import Proposal, propose

__all__ = [
    "Confinement",
    "Latency",
    "Measured",
    "Proposal",
    "Tenant",
    "confinement",
    "measure",
    "plot_curves",
    "plot_side_by_side",
    "propose",
    "side_by_side",
    "sms_seen",
]
