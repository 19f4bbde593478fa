"""`top`: a run on the whole terminal, from any terminal; followed while it goes, or replayed."""
