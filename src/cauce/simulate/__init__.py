"""A deterministic simulation of whole runs: one seed fixes settings, delays, faults and every order of events.

    clock        virtual time, and what happens in it
    script       what a seed draws: settings, fault rates, delays; and the trace of what came of it
    files        the journal on a disk that fills up, and a driver that dies at any of its writes
    roles        the only fakes: engine, learner and reward, as plain deterministic classes
    workers      their processes: slow, hung, cut off, dead
    invariants   what must hold of the record, read apart from the code that wrote it
    run          a seed from its first start, through all its crashes, to its end

Trainer, flow, pools, exchange, buffer, recovery, evaluation, checkpoints, weight store and journal are those of every
run. Left out: Ray, processes of the operating system, and the numerics of models.
"""
