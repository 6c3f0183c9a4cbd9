"""The module that a user gets from `compile`, registration by hand, whether its loss is trained, and the report.

The emitted graph is used for recording, and for training when the empirical Fisher is recorded in the training
backward. Every other forward runs the original module, so it is exact by construction.

**In place.** torch prefers the replaced call of a module, and drops it from copies and pickles. A replaced `forward`
would be copied, and hooks cannot replace a forward. The call is replaced only while an optimizer is attached.

**Registration by hand** names a node. The form of the layer is laid over the graph there, so the result is the use that
the matcher would find, or an error that lists the uses at that node. A name may be a piece, `w[0:64]`; then the
compiler also cuts there, if all uses allow it. The scan for the remaining parameters treats registrations by hand as
constants.

**The trained loss** is the user's. It is known only by the gradient that its backward sends into the outputs of a
forward, which is watched from the forward on (`loss_scale`).
"""
