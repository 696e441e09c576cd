"""Chaos: a run beside which somebody kills its processes, compared with the same run left in peace.

    given      what the user gives, looked at before anything starts
    faults     what is done to which process, how often, and when: drawn from a seed
    processes  the processes of a run, found by the titles that Ray gives them
    run        both runs from start to end, and every fault in between
    verdict    what the two records say: nothing lost, nothing twice, and what it cost

Everything is done from outside, by signals, so that the run does not know of it. Linux only, since it reads /proc.
"""
