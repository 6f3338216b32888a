"""Detection and segmentation through mmengine, mmdet and mmsegmentation; nothing else in this project imports them.

Call :func:`protocols.openmmlab.ready.prepare` before importing any other module of this package.
"""
