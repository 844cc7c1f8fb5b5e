"""Commands are killed at random moments, run again, and compared with a run that nobody disturbed.

make chaos
python -m tests.chaos --rounds 5 --seed 7 --only predict --only train
"""
