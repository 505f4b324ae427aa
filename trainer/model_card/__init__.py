"""The model card of an exported checkpoint, made of the records of its run."""
