"""Tasks of ``distseg bench``, by the word on the command line."""

MEASURED = {
    "strong": "the same step on 1, 2, 4, ... ranks of the job",
    "weak": "a step that grows with the ranks: more images, or larger ones",
    "pipeline": "stages, by number of micro-batches and schedule",
    "halo": "number of layers between halo exchanges of neighbouring tiles",
    "memory": "peak memory of each rank, split along each axis of the mesh",
    "io": "reading of crops from a store, from the disk and from memory",
}

SHOWN = {
    "compare": "two results: ratios of the seconds, and what else differs",
    "report": "one HTML page about the results in a folder",
}
