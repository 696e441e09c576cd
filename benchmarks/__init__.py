"""What is measured, and how: `make bench` runs all of it, `make bench NAME` one. Figures go to results.json.

run.py             the command
grpo_step.py       one training step of ours against TRL's, in turns on one machine
reward_curve.py    both rewards over ten steps, drawn by chart.py
generation.py      generated tokens a second, against transformers and vLLM
learner_speed.py   packed against padded rows, at one point and over lengths and group sizes
rates.py           decoding and learning against bare matrix products of the same shapes (gemm.py)
weights_sync.py    published weights in four readers against four memory copies
time_to_accuracy.py  seconds to a held-out accuracy, ours and TRL's
numerics.py        sampler against learner on the first plan
journal_share.py   what durability costs
startup.py         import, commands, the first reward, memory
rounds.py          two processes that play the same rounds in turns; duel.py: training steps
results.py         the figures on disk; page.py makes docs/performance.md and its pictures from them
"""
