"""Looking at a backbone: attention, pattern layouts, correspondences and principal components, as arrays and figures.

The command line (``ibot-eval draw``, ``ibot-eval patterns``) and the application call the same functions.
"""
