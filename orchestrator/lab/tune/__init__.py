"""`tune`: what each setting of a training brings on this machine."""
