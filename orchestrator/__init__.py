"""The head: the user's terminal, the cluster and every decision about slots.

Never imports torch.
"""
