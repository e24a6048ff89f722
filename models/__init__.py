"""The policy: its network, how it is trained, and how a shipped checkpoint is asked.

Inference needs NumPy alone; training needs the extra `train`.
"""
