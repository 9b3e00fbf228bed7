"""Plant one fault after another in a copy of the code, and see whether the default tests find it.

For each fault the test files that are most likely to find it run first, then the whole default suite. Nothing outside the
copy is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import parent, report
from benchmarks.machine import ROOT
from benchmarks.rows import Rows

QUESTION = "Which of the faults that are planted in distseg do the default tests find?"
_COPIED = ("distseg", "tests", "benchmarks", "jobs", "docs", "install")
_LIMIT = 1800  # seconds of all tests on one fault


class Mutant(NamedTuple):
    """A fault: in ``file`` of distseg/ the only ``before`` becomes ``after``; ``tests`` are tried first."""

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTANTS = (
    Mutant("a window starts a stride too late", "tiling/tile.py", "max(0, (a - h) // s * s)", "max(0, -(-(a - h) // s) * s)", "tile exact"),
    Mutant("a window ends a pixel too early", "tiling/tile.py", "min(n, -(-(b + h) // s) * s)", "min(n, -(-(b + h - 1) // s) * s)", "tile exact"),
    Mutant("tiles do not begin at multiples of the stride", "tiling/tile.py", "return [(a * stride, min(b * stride, length))", "return [(a * stride, min(b * stride + 1, length))", "tile"),
    Mutant("groups train on images of other groups", "data/sampler.py", "(micro_batch * self.groups + self.group) * self.images", "(micro_batch + self.group) * self.images", "sampler verify exact"),
    Mutant("gradients are scaled up to the largest norm", "comm/reducer.py", "        if (factor := clip_factor(largest, norm)) < 1:\n", "        if (factor := clip_factor(largest, norm)) > 0:\n", "reducer step optim verify"),
    Mutant("a parameter without a gradient keeps the last step's", "comm/reducer.py", "                view.zero_()\n", "                pass\n", "reducer step api"),
    Mutant("gradients are not reset before a step", "comm/reducer.py", "            bucket.zero_()\n", "            pass\n", "reducer verify exact"),
    Mutant("a sum over ranks is a rank's own part", "comm/collective.py", "    total = _host(x).copy()\n", "    total = _host(x).copy()\n    return upload(torch.from_numpy(total), x.device)\n", "collective norm exact"),
    Mutant("strips of a message overlap", "comm/halo.py", "part = values[offset : offset + count]", "part = values[max(0, offset - 1) : max(0, offset - 1) + count]", "exchange"),
    Mutant("gradients of halos replace the owner's", "comm/halo.py", "                _view(dxs, strip).add_(part)\n", "                _view(dxs, strip).copy_(part)\n", "exchange"),
    Mutant("gradients of halos stay with the neighbour as well", "runtime/stored_halos.py", "stored.buffer_for(box).zero_()", "stored.buffer_for(box)", "streaming program networks"),
    Mutant("images of a norm are weighted alike", "layers/moments.py", "(parts.count / count.where(count > 0, 1)).unsqueeze(-1)", "(1 / len(parts.count) + 0 * parts.count).unsqueeze(-1)", "moments norm exact"),
    Mutant("deviations of parts' means are forgotten", "layers/moments.py", "m2 = (parts.m2 + parts.count.unsqueeze(-1) * (parts.mean - mean) ** 2).sum(0)", "m2 = parts.m2.sum(0)", "moments norm exact"),
    Mutant("running variances are biased", "layers/norm.py", "(m.count - 1).clamp(min=1) if unbiased", "m.count if unbiased", "api norm"),
    Mutant("a dropped channel keeps its spread in the norm", "layers/norm.py", "part.m2 * m * m", "part.m2 * m", "norm dropout exact"),
    Mutant("masks belong to a window's pixels, not the image's", "layers/dropout.py", "position.unsqueeze(-1) * n + torch.arange(a, b, device=device)", "position.unsqueeze(-1) * n + torch.arange(b - a, device=device)", "dropout exact"),
    Mutant("masks are the same in every epoch", "layers/dropout.py", "rng.key(seed, epoch, sample, layer", "rng.key(seed, 0, sample, layer", "dropout verify"),
    Mutant("ignored pixels count in the mean loss", "layers/loss.py", "            return _beside_a_sum(valid.count_nonzero())\n", "            return _beside_a_sum(torch.ones_like(valid).count_nonzero())\n", "loss exact"),
    Mutant("1F1B runs one forward pass too few ahead", "runtime/schedule.py", "min(stages - 1 - stage, micro_batches)", "max(0, min(stages - 2 - stage, micro_batches))", "schedule pipeline"),
    Mutant("ZB-H1 computes weights a micro-batch early", "runtime/schedule.py", "action.micro_batch >= stage:", "action.micro_batch >= stage - 1:", "schedule pipeline"),
    Mutant("frozen parameters thaw an epoch late", "runtime/optimizer.py", 'if epoch >= group["thaw"]', 'if epoch > group["thaw"]', "frozen finetune optim"),
    Mutant("objects touch across labels", "data/vector/components.py", "        return upper[same], lower[same]\n", "        return upper, lower\n", "objects"),
    Mutant("ignored pixels count in the scores", "inference/metrics.py", "valid = truth != ignore", "valid = truth >= 0", "metrics"),
    Mutant("a damaged store is read", "data/store/chunks.py", "chunk_sum(data) != self._sums[index]", "chunk_sum(data) is None", "damage store"),
    Mutant("the last numbers of a long sum stay a rank's own", "comm/ordered_sum.py", "ends = [memory.numel() * rank // size for rank in range(size + 1)]", "ends = [memory.numel() // size * rank for rank in range(size)] + [memory.numel() // size * size]", "transport"),
    Mutant("keys do not order the ranks of a part", "comm/gloo.py", "members = [rank for c, _, rank in sorted(every) if c == color]", "members = [rank for c, _, rank in every if c == color]", "transport"),
    Mutant("gradients for fp16 are not rounded before the sum", "comm/reducer.py", "wire = bucket.to(torch.float16).float() if self.fp16 else _wire(bucket)", "wire = bucket.float() if self.fp16 else _wire(bucket)", "reducer"),
    Mutant("a strip has more cells than it may", "tiling/tile.py", "(max(1, box.pixels) * rows)))", "(max(1, box.pixels))))", "tile"),
    Mutant("the last of several equal cells is not read", "tiling/resize.py", "return a * self.n // self.m, -(-b * self.n // self.m)", "return a * self.n // self.m, b * self.n // self.m", "resize"),
    Mutant("means of channels deviate once from their group's", "layers/moments.py", "deviation = m.count[..., None, None] * (mean - of_group) ** 2", "deviation = (mean - of_group) ** 2", "moments norm"),
    Mutant("a sum of losses ignores the label of any of them", "layers/criterion.py", "return found.pop() if len(found) == 1 else None", "return found.pop()", "api"),
    Mutant("the best checkpoint is removed", "training/checkpoint/saving.py", 'kept = {name, index["best"], *names', "kept = {name, *names", "checkpoint"),
    Mutant("a run goes on behind a step that it has not finished", "training/resume.py", "step = min(samples // batch, steps)", "step = min(-(-samples // batch), steps)", "resume"),
    Mutant("a mask that changed is not noticed", "data/store/source.py", "dict.fromkeys(file for source in sources for file in source.files)", "dict.fromkeys(source.files[0] for source in sources)", "reference"),
    Mutant("each slice opens its volume again", "data/store/source.py", "return self.files[0].path, self.dims, self.alpha", "return self.files[0].path, self.page, self.alpha", "reference"),
    Mutant("files are closed in the order in which they were opened", "data/store/open_files.py", "found = self._readers.pop(source.key, None)", "found = self._readers.get(source.key)", "reference"),
    Mutant("pixels move by one distance along all dims", "data/warp.py", "rng.uniform_of(rng.key(self.key, dim), index)", "rng.uniform_of(rng.key(self.key, 0), index)", "augment"),
    Mutant("pixels of a turned sample share their noise", "data/sample_reader.py", "(pixels, box.relative_to(sample.seen), sample.seen.size)", "(pixels, box.relative_to(sample.seen), sample.seen.size[::-1])", "augment"),
    Mutant("elastic vectors repeat in the margin for blur", "data/sampler.py", "tuple(a - margin for a in seen.start),\n                tuple(b + margin for b in seen.stop),", "seen.start,\n                seen.stop,", "augment"),
    Mutant("objects that touch in a column have no border", "data/masks.py", "            for dim in range(numbers.ndim):\n                one", "            for dim in range(1, numbers.ndim):\n                one", "masks"),
    Mutant("a mask hides the number for no data", "data/nodata.py", "return hidden if found is None else found | hidden", "return hidden if found is None else hidden", "validity"),
    Mutant("all strips have the areas of the first rows", "data/vector/polygons.py", "row_areas[top : top + rows]", "row_areas[:rows]", "objects"),
    Mutant("an object loses the area of a part that joins it", "data/vector/polygons.py", "np.add.at(areas, of, np.concatenate([part.areas for part in parts]))", "areas[of] = np.concatenate([part.areas for part in parts])", "objects"),
    Mutant("polygons at 190 degrees east miss an image at 170 west", "data/vector/placed.py", "turns = (-_ROUND, 0.0, _ROUND) if around else (0.0,)", "turns = (0.0, _ROUND) if around else (0.0,)", "vector_masks"),
    Mutant("a vector file that was written again is not read", "data/vector/layer.py", "return _read(path, rule, found.st_size, found.st_mtime_ns)", "return _read(path, rule, found.st_size, 0)", "vector_masks"),
    Mutant("voxels begin too early behind lines that end as on Windows", "data/formats/nrrd.py", "len(text) + len(blank)", "len(text) + 2", "nrrd"),
    Mutant("a scale leaves the translation before it", "data/formats/ngff.py", "translation = [float(n) * t for n, t in zip(numbers, translation)]", "translation = [float(t) for n, t in zip(numbers, translation)]", "ome_zarr"),
    Mutant("a slice has the spacing of the volume's first dims", "data/formats/ome_zarr_writer.py", "scale = np.sqrt((matrix[:, 1:] ** 2).sum(0))[-dims:]", "scale = np.sqrt((matrix[:, 1:] ** 2).sum(0))[:dims]", "ome_zarr_maps"),
    Mutant("overviews show that there is no data first", "report/shrink.py", "        if label == nodata:\n            continue\n", "", "ome_zarr_maps"),
    Mutant("halo messages go in one direction", "planning/mesh_search.py", "found[number] = there + message, back + message", "found[number] = there + message, back", "layouts"),
    Mutant("a tile is sent the cells that it has", "planning/tile_grids.py", "first * (needed - had)", "first * needed", "layouts"),
    Mutant("a sum over ranks sends each number once", "planning/machine.py", "return 2 * (ranks - 1) / ranks * size / speed", "return (ranks - 1) / ranks * size / speed", "rates"),
    Mutant("ranks of a node do not share the network", "planning/machine.py", "speed = self.link if ranks <= self.ranks else self.network / self.ranks", "speed = self.link if ranks <= self.ranks else self.network", "rates"),
    Mutant("the search keeps one layout of a family", "planning/mesh_search.py", "return len(known) < wanted or least <= known[wanted - 1][0].seconds", "return len(known) < wanted or least <= known[0][0].seconds", "layouts"),
    Mutant("the search recomputes nothing where no cut fits", "planning/mesh_search.py", "                    add_again(one)  # no split into stages fits, or stages would share a weight\n", "                    pass\n", "layouts"),
    Mutant("all of a backward pass waits for the weights", "planning/pass_times.py", "sum(layer.backward * layer.put_off for layer in layers)", "sum(layer.backward for layer in layers)", "profile"),
    Mutant("a message's latency counts in its rate", "planning/calibration.py", "return small.seconds, large.bytes / max(1e-9, large.seconds - small.seconds)", "return small.seconds, large.bytes / max(1e-9, large.seconds)", "rates"),
    Mutant("the last draw of patches is too small", "training/patchgd/engine.py", "start = min(at * share, count - share)", "start = at * share", "patchgd"),
    Mutant("the last update of a step divides by iterations that are not there", "training/patchgd/engine.py", "norms.append(self._update(rate, 1 + j % every))", "norms.append(self._update(rate, every))", "patchgd"),
    Mutant("filling replaces the first features of small images", "training/patchgd/engine.py", "if j < turns[i]]", "]", "patchgd"),
    Mutant("logits of images of several sizes change places", "training/patchgd/filling.py", "[[order.index(i) for i in range(len(order))]]", "[order]", "patchgd"),
    Mutant("all iterations of a step have the same masks", "training/patchgd/engine.py", "self.context.epoch = self.head_context.epoch = rng.key(epoch, what, j)", "self.context.epoch = self.head_context.epoch = rng.key(epoch, what)", "patchgd"),
    Mutant("outputs of drawn patches stay as they were filled", "training/patchgd/map_engine.py", "            put(self._answers, pairs, self._sums(rows, pairs))\n", "            pass\n", "patch_maps"),
    Mutant("a single logit must be above a half", "inference/metrics.py", "(logits[0] > 0)", "(logits[0] > 0.5)", "metrics"),
    Mutant("recall counts the predicted contour", "inference/boundary.py", "recall = ratio(counts[_TRUE_NEAR], counts[_TRUE_LINE]) or 0.0", "recall = ratio(counts[_FOUND_NEAR], counts[_TRUE_LINE]) or 0.0", "boundary"),
    Mutant("all ranks predict by the layout of one block", "inference/predictor.py", "key = tuple(map(tuple, borders))\n", "key = tuple((0, b[-1]) for b in borders)\n", "predictor"),
    Mutant("a block without all of its pixels is predicted", "inference/image_source.py", "tuple(n // shrink for n in reader.size)", "tuple(-(-n // shrink) for n in reader.size)", "image_source"),
    Mutant("one band without data hides a predicted pixel", "inference/image_source.py", "return None if found is None else found.all(0)", "return None if found is None else found.any(0)", "image_source"),
    Mutant("the last rows of a tile are left out of the loss", "inference/evaluate.py", "for start in range(0, len(labels), thickness):", "for start in range(0, max(1, len(labels) - thickness + 1), thickness):", "evaluate"),
    Mutant("class weights of ignored pixels count", "layers/loss.py", "_beside_a_sum(weights.where(valid, 0).sum())", "_beside_a_sum(weights.sum())", "loss"),
    Mutant("the best checkpoint is one that was set aside", "training/checkpoint/saving.py", "        best, score = _best_of(folder, there)\n", "        best, score = (read_index(folder)[key] for key in (\"best\", \"best_score\"))\n", "checkpoint"),
    Mutant("the last epoch is not validated", "training/loop.py", "and (self.ended or (number + 1) % train.validate_every == 0)", "and (number + 1) % train.validate_every == 0", "validation"),
    Mutant("a larger error is a better score", "inference/metrics.py", 'return -validation["rmse"] if', 'return validation["rmse"] if', "metrics"),
    Mutant("windows of each round through a pipeline are numbered from 0", "inference/windows.py", "yield first + m, output", "yield m, output", "predictor"),
    Mutant("statistics of all layers have the width of the first", "layers/norm.py", "(x.flatten().split(channels) for x in total)", "(x.flatten().split(channels[0]) for x in total)", "norm"),
    Mutant("PyTorch's unbiased variance counts as the biased one", "layers/norm.py", "var.double() * (count - 1)", "var.double() * count", "norm"),
    Mutant("each window counts a vector's rounding in full", "layers/norm.py", "        * c.hat\n        * times\n", "        * c.hat\n", "images"),
    Mutant("gradients of halos have the tag of halos", "runtime/stored_halos.py", "            2 * tensor_id + 1,\n", "            2 * tensor_id,\n", "message_order"),
    Mutant("a message over a closed connection counts as complete", "comm/gloo.py", "        if self._error is not None:\n            raise ConnectionError(_lost(f\"rank {self._peer}", "        if False:\n            raise ConnectionError(_lost(f\"rank {self._peer}", "transport"),
    Mutant("the norm of all gradients is a sum of norms", "training/distributed.py", "sum(float(torch.linalg.vector_norm(g.double())) ** 2 for g in parts)", "sum(float(torch.linalg.vector_norm(g.double())) for g in parts)", "api"),
    Mutant("a batch without an image is taken", "training/distributed.py", "        if not len(images):\n", "        if False:\n", "api"),
    Mutant("the words about a validity mask are its values", "data/formats/gdal.py", "self._valid, \"has a validity mask: pixels where the mask is 0 have no data\"", "\"has a validity mask: pixels where the mask is 0 have no data\", self._valid", "gdal"),
    Mutant("tiles that kept their graph are the ones computed again", "cli/streamed_layout.py", "isinstance(op, BackwardTile) and not op.kept", "isinstance(op, BackwardTile) and op.kept", "layouts"),
    Mutant("a rank alone has the memory of a node", "cli/planned_training.py", "max(1, (cores or 1) // torch.get_num_threads())", "max(1, (cores and 1) // torch.get_num_threads())", "layouts"),
    Mutant("a port may have any number", "comm/transports.py", "not text.isdecimal() or not 0 < int(text) < 1 << 16", "not text.isdecimal()", "transport"),
    Mutant("a process at work is killed as soon as a stopped one", "comm/guardian.py", "self.rank.limit if stopped else max(self.rank.limit, ENDS_WITHIN)", "self.rank.limit", "watch"),
    Mutant("the number of bands that is given is not taken", "api.py", "    if in_channels is not None:\n", "    if in_channels is None:\n", "api"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument("--only", nargs="*", help="parts of names of faults; by default all")
    parser.add_argument(
        "--all-tests",
        action="store_true",
        help="the slow tests too, for what the default ones miss",
    )
    options = parser.parse_args(arguments)
    chosen = [
        m for m in MUTANTS if not options.only or any(part in m.name for part in options.only)
    ]
    rows = []
    for mutant in chosen[:1] if options.quick else chosen:
        rows.append(_row(mutant, options.quick, options.all_tests))
        print(f"{rows[-1]['fault']}: {rows[-1]['found by']}", file=sys.stderr, flush=True)
    missed = sum(row["found by"] == "nothing" for row in rows)
    notes = f"{len(rows) - missed} of {len(rows)} faults are found"
    report("mutants", QUESTION, Rows(rows, {}), options, {}, notes)


def _row(mutant: Mutant, quick: bool, every: bool) -> dict:
    """Return what found a fault, and after how many seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        _plant(mutant, Path(folder))
        first = [f"tests/test_{name}.py" for name in mutant.tests.split()]
        rounds = [first[:1]] if quick else [first, []] + [["-m", ""]] * every
        found = next(filter(None, (_first_failure(Path(folder), r) for r in rounds)), "nothing")
    return {
        "fault": mutant.name,
        "file": mutant.file,
        "found by": found,
        "s": time.monotonic() - began,
    }


def _plant(mutant: Mutant, folder: Path) -> None:
    """Copy the project to ``folder``, with the fault.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    path = folder / "distseg" / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.before!r} is {text.count(mutant.before)} times in "
            f"{mutant.file}, but must be there once: change MUTANTS"
        )
    path.write_text(text.replace(mutant.before, mutant.after))


def _first_failure(folder: Path, arguments: Sequence[str]) -> str | None:
    """Return the first test that fails, or None if all pass."""
    run = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            run, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {_LIMIT} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return failed[1]


if __name__ == "__main__":
    main()
