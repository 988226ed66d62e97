"""The main job: train on several ranks, kill all of them, resume, and compare with a run that was
never interrupted. `train` is the example to copy; the other modules run it and look at it.
"""
