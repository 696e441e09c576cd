"""What is measured, and how: `make bench` runs all of it, `make bench NAME` one. Figures go to results.json.

run.py             the command
grpo_step.py       one training step of ours against TRL's, in turns on one machine
reward_curve.py    both rewards over ten steps, drawn by chart.py
numerics.py        sampler against learner on the first plan
journal_share.py   what durability costs
startup.py         import, commands, the first reward, memory
results.py         the figures on disk
"""
