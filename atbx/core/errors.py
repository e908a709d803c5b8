"""The exceptions of atbx: one tree, each naming the thing, the place, what was expected and what was found."""

from __future__ import annotations


class AtbxError(Exception):
    """Base of every error that atbx raises on purpose.

    The message is built from parts so that each error names its place and both sides of the mismatch;
    the parts stay readable as attributes.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.found, self.hint = what, where, expected, found, hint
        text = f"{where}: {what}" if where else what
        if expected is not None:
            text += f"; expected {expected}"
        if found is not None:
            text += f"{',' if expected is not None else ';'} found {found}"
        if hint:
            text += f". {hint}"
        super().__init__(text)


class ShapeError(AtbxError, ValueError):
    """Shapes of an op's operands, or of a tree's leaves, do not fit."""


class DTypeError(AtbxError, TypeError):
    """Dtypes do not fit; atbx never promotes tensors silently."""


class StagingError(AtbxError, TypeError):
    """A function could not be staged: a torch call, a Python branch or a captured tensor on a staged value."""


class StaticArgumentError(AtbxError, TypeError):
    """A static argument is not frozen and hashable, or is unknown."""


class BucketError(AtbxError, ValueError):
    """A bucketed axis does not fit its buckets, its count, or the op that mixes along it."""


class DonationError(AtbxError, RuntimeError):
    """A value that was donated is used again, or one buffer is donated twice."""


class BindingError(AtbxError, ValueError):
    """Parameters do not match what they were bound to."""


class FrozenCacheError(AtbxError, RuntimeError):
    """A frozen variant cache was asked for a variant that it does not hold."""


class FallbackError(AtbxError, RuntimeError):
    """No fused kernel applies to an op and `fallback="error"` was asked for."""


class UnsupportedError(AtbxError, ValueError):
    """Something valid elsewhere that this version or backend does not offer."""


class CapacityError(AtbxError, ValueError):
    """A request or a write needs more KV slots or more memory than there are."""


class CacheStateError(AtbxError, RuntimeError):
    """A KV cache value cannot be used this way: interrupted, or truncated past a wrapped window."""


class OptionError(AtbxError, ValueError):
    """An option of a call is unknown, out of range, or contradicts another."""


class ChatTemplateError(AtbxError, ValueError):
    """A chat template does not parse, fails, or refuses the messages; names the template's line."""


class TreeError(AtbxError, ValueError):
    """Trees differ: missing, unexpected or mismatched leaves (see `mismatches`)."""

    def __init__(self, what: str, *, mismatches: tuple[str, ...] = (), **parts: object) -> None:
        self.mismatches = mismatches
        listed = "".join(f"\n  {line}" for line in mismatches)
        super().__init__(what + listed, **parts)  # type: ignore[arg-type]


class CheckpointError(AtbxError, ValueError):
    """A weight file cannot be read or written; names the file and the byte offset where known."""

    def __init__(self, what: str, *, path: object = None, offset: int | None = None, **parts: object) -> None:
        self.path, self.offset = path, offset
        place = None if path is None else f"{path}" + (f" at byte {offset}" if offset is not None else "")
        parts.setdefault("where", place)
        super().__init__(what, **parts)  # type: ignore[arg-type]


class MissingExtraError(AtbxError, ImportError):
    """An optional dependency is not installed; names the extra that brings it."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {module}, which is not installed",
            hint=f'Install it with: pip install "atbx[{extra}]"',
        )
        self.module, self.extra = module, extra


class NpuError(AtbxError, RuntimeError):
    """A call of torch_npu failed: `what` is the first real cause; see `code`, `meaning`, `operands` and `advice`.

    codes: every code that was printed. is_late: the failing launch may be an earlier one than `where`; launch: its
    name, where torch_npu's queue tells it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        code: str | None = None,
        codes: tuple[str, ...] = (),
        meaning: str | None = None,
        operands: tuple[str, ...] = (),
        advice: str | None = None,
        is_late: bool = False,
        launch: str | None = None,
    ) -> None:
        self.launch = launch
        self.code, self.codes, self.meaning = code, codes, meaning
        self.operands, self.advice, self.is_late = operands, advice, is_late
        name = f"{meaning} ({code}): " if meaning and code else ""
        given = f"; operands {', '.join(operands)}" if operands else ""
        late = "; an earlier launch may be the one that failed" if is_late else ""
        if launch is not None:
            late = f"; the launch that failed is {launch}"
        super().__init__(f"{name}{what}{given}{late}", where=where, hint=advice)
        self.cause = what
