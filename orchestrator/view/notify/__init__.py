"""The verb `notify`: follows a run from a process of its own and tells of it by mail or chat."""
