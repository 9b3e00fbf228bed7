"""Measurements of training steps on the ranks of a job, for ``distseg bench``.

A kind of measurement, such as strong scaling, is a list of cases (``cases``). ``measuring`` times
the very step of training for each case, and ``results`` holds the figures in a JSON file. Tables,
pictures, comparisons and the HTML page are made from such files alone.
"""
