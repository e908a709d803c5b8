"""`atbx convert`: a model of any form that is read, as one msgpack file (or shards) that is mapped at load."""

from __future__ import annotations

import argparse

from atbx.checkpoints import conversion, msgpack_reader
from atbx.commands.opening import dtype_named
from atbx.commands.output import print_json, size_in_words


def run(args: argparse.Namespace) -> None:
    """Convert, then say what was written."""
    conversion.convert(
        args.source, args.out, dtype=dtype_named(args.dtype), shard_bytes=args.shard_size, progress=True
    )
    entries = msgpack_reader.inspect(args.out)
    files = sorted({str(entry.file) for entry in entries})
    nbytes = sum(entry.nbytes for entry in entries)
    if args.json:
        print_json({"path": args.out, "files": files, "tensors": len(entries), "bytes": nbytes})
        return
    shards = f" in {len(files)} files" if len(files) > 1 else ""
    print(f"{args.out}: {len(entries)} tensors, {size_in_words(nbytes)}{shards}")
