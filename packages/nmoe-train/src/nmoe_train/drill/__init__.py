"""Faults on purpose: a small training is disturbed at random instants and must go on by itself.

`plan` draws what happens and when, `inject` does it from outside, or by `orders` which `sabotage`
obeys inside a worker. `report` compares what was recorded with an undisturbed run, `run` does all
of it, and `command` is the command line's.
"""
