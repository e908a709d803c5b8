"""Codes and texts of the Ascend stack as data, and the first real cause in what it printed.

A failure comes as many lines: torch_npu's own (ERR00100 "call acl api failed"), a numeric code of the ACL, an E-code
of the layer that noticed it (EZ9999: operators, EE9999: runtime, ...), a trace, and advice. The first line of an E-code
that says something is the cause; what follows are its consequences. Sources of the table: rt_error_codes.h and the
error code reference of CANN's runtime, the documents of aclnn, the installation guide's questions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHECK = "atbx explain MODEL --device npu names the kernel of each op and what it refuses"
_INSTALLATION = "atbx doctor  # names the package that is missing or from another release"
_MEMORY = "Use fewer rows or a shorter context, or export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
_CAPTURE = (
    "Capture on a side stream; inside it nothing may wait, allocate outside the pool or copy pageable memory"
)
_BOUNDS = "Check lengths, block tables and slots: an index outside its tensor; ASCEND_LAUNCH_BLOCKING=1 names the op"
_HARDWARE = "npu-smi info -t health -i 0; a fault of the device: restart it, or use another"
_GRAPHS = "Capture fewer graphs (fewer bucket sizes); driver 25.5.1 and newer has more streams"
_DRIVER = "atbx doctor  # compares driver and CANN; a newer driver is installed on the host"
_SOURCE = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_SOURCE_ATB = "Install NNAL of the toolkit's release and: source /usr/local/Ascend/nnal/atb/set_env.sh"
_PYTHON = "pip install attrs decorator psutil scipy sympy 'numpy<2' (numpy 2 from CANN 9.0), then: " + _SOURCE


@dataclass(frozen=True)
class Meaning:
    """What a code or a text stands for, and what to do."""

    code: str
    text: str
    advice: str


def _table(*groups: tuple[str, dict[str, str]]) -> dict[str, Meaning]:
    return {code: Meaning(code, text, advice) for advice, group in groups for code, text in group.items()}


CODES = _table(
    (
        "Check the device index: torch.npu.device_count(), ASCEND_RT_VISIBLE_DEVICES",
        {
            "107000": "invalid parameter",
            "107001": "invalid device",
            "107002": "no context: no device was set",
            "EE1001": "invalid argument of the runtime",
            "EH0001": "invalid argument of the ACL",
        },
    ),
    (
        _CAPTURE,
        {
            "107003": "stream of another context",
            "107005": "stream of no model",
            "107024": "capture: forbidden dependency",
            "107025": "capture: a stream was not joined",
            "107026": "capture: the model is captured already",
            "107027": "capture: the stream is captured already",
            "107028": "capture: an event of a capture",
            "107029": "capture: the stream is not captured",
            "107030": "capture: operation not allowed while capturing",
            "107031": "capture: dependency on the default stream",
            "107032": "capture: conflict",
            "107033": "capture: state of a task group",
            "107034": "capture: a task group was interrupted",
            "107036": "capture: wrong stream",
            "107038": "capture: wrong thread",
            "107041": "capture: an asynchronous operation would be synchronous",
            "507903": "the capture was invalidated by an operation inside it",
        },
    ),
    (
        "Wait for a replay before updating it, and update what was recorded as updatable",
        {
            "107037": "a replay is still running",
            "107040": "update of a captured graph failed",
            "207019": "the captured operator cannot be updated",
        },
    ),
    (
        "Find what it waits for: a length that was not updated in a graph, or a collective that another process left",
        {
            "107019": "timeout of a wait",
            "107020": "timeout of a task",
            "507046": "timeout of a stream",
            "507047": "timeout of an event",
            "EE1002": "timeout of a stream",
        },
    ),
    (_DRIVER, {"207000": "feature not supported by the driver", "EE1015": "the driver is too old"}),
    (
        _MEMORY,
        {
            "207001": "out of memory",
            "207018": "out of device memory",
            "EL0004": "out of memory",
            "EE1013": "out of host memory",
        },
    ),
    (
        "Values overflowed: try bfloat16 or float32",
        {
            "207003": "overflow on a cube core",
            "207016": "overflow on a vector core",
            "207017": "overflow",
        },
    ),
    (
        _GRAPHS,
        {
            "207005": "resources of the device exhausted",
            "207007": "events exhausted",
            "207008": "streams exhausted",
            "207009": "notifies exhausted",
            "207010": "models exhausted",
            "EL0009": "streams exhausted",
        },
    ),
    (
        _INSTALLATION,
        {
            "507008": "kernels for another chip",
            "561003": "kernel not found",
            "561103": "kernel not found",
            "561000": "internal error of an operator",
            "561001": "internal error of an operator",
            "176003": "compilation at run time failed",
        },
    ),
    (
        _CHECK,
        {
            "161001": "null pointer given to an operator",
            "161002": "invalid parameter of an operator",
            "561002": "tiling failed: a rule on shapes, head size or list lengths",
            "EZ1001": "invalid parameter of an operator",
            "ERR00007": "feature not supported",
        },
    ),
    (
        _BOUNDS,
        {
            "507011": "a model or graph failed; an earlier line tells why",
            "507013": "DMA error: a bad host address",
            "507014": "timeout of a cube core",
            "507015": "exception of a cube core",
            "507016": "trap of a cube core",
            "507017": "timeout of the AI CPU",
            "507018": "exception of the AI CPU",
            "507034": "timeout of a vector core",
            "507035": "exception of a vector core",
            "507036": "trap of a vector core",
            "507042": "read past the end",
            "507043": "write past the end",
            "507044": "read past the end",
            "507045": "write past the end",
            "EZ2001": "a kernel accessed memory outside its tensors",
        },
    ),
    (
        _HARDWARE,
        {
            "507053": "device memory error",
            "507054": "device memory error that cannot be corrected",
            "507056": "link error",
            "507057": "error of a remote device",
            "507899": "internal error of the driver",
            "507900": "internal error of the AI CPU",
            "507901": "the device was disconnected",
        },
    ),
    ("Check the network between the devices: hccn_tool", {"507904": "a collective failed after retries"}),
    (
        _PYTHON,
        {
            "500001": "the operator compiler failed",
            "500002": "the graph engine failed",
            "E40002": "Python is too old for the operator compiler",
            "E40020": "the operator compiler's Python modules cannot be imported",
            "E40021": "compilation of an operator failed",
        },
    ),
    (
        "The first line that it prints tells more; attach it with `atbx doctor --json` to a bug report",
        {
            "361001": "a call of the runtime failed",
            "507000": "internal error of the runtime",
            "507001": "internal error of the task scheduler",
            "E19025": "an output buffer is too small",
            "EZ9999": "inner error of the operator library",
            "EE9999": "inner error of the runtime",
            "EH9999": "inner error of the ACL",
            "EK9999": "inner error of a kernel",
            "E89999": "inner error of the graph engine",
            "ERR00100": "a call of the ACL failed",
            "ERR00008": "a resource was not found",
            "ERR99999": "unknown error",
        },
    ),
)
"""Meaning of every code, by code."""

TEXTS: tuple[tuple[re.Pattern[str], Meaning], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), Meaning(code, text, advice))
    for pattern, code, text, advice in (
        (
            r"libatb\.so|libtbe_adapter\.so|libasdops|cxx_abi_",
            "libatb.so",
            "NNAL is missing or does not fit",
            _SOURCE_ATB,
        ),
        (
            r"lib(hccl|ascendcl|acl_op_compiler|ge_runner|graph)\.so.*cannot open",
            "libhccl.so",
            "CANN's libraries are not found",
            _SOURCE,
        ),
        (r"libascend_hal\.so|drvErr|dcmi|npu-smi.*not found", "driver", "the driver is not found", _DRIVER),
        (
            r"driver interface.*does not exist|driver version capability",
            "EE1015",
            "the driver is too old",
            _DRIVER,
        ),
        (r"binary load failed|Get kernel failed", "561003", "kernel not found", _INSTALLATION),
        (r"failed to import Python module", "E40020", CODES["E40020"].text, _PYTHON),
        (r"op compile failed", "E40021", CODES["E40021"].text, _PYTHON),
        (
            r"Two accelerators cannot be used",
            "ERR00007",
            "another accelerator is present",
            "pip install the CPU build of torch",
        ),
        (r"alloc sq cq fail|insufficient_stream_resources", "207008", "streams exhausted", _GRAPHS),
        (r"NPU out of memory", "207001", "out of memory", _MEMORY),
        (r"undefined symbol", "symbol", "libraries of releases that do not go together", _INSTALLATION),
        (r"No module named 'torch_npu'", "torch_npu", "torch_npu is not installed", "pip install torch_npu"),
        (
            r"task queue stopped",
            "queue",
            "an earlier launch failed in torch_npu's task queue",
            "TASK_QUEUE_ENABLE=0 ...  # runs the program again with errors where they happen",
        ),
    )
)
"""Texts that come without a code, and their meaning; the first that matches counts."""

_NUMERIC = re.compile(
    r"(?:error code(?: is)?|errorcode|error_code|\bret|retCode|result)\W{0,4}(\d{6})\b", re.IGNORECASE
)
_LINE = re.compile(
    r"(?:\[PID:[^\]]*\]\s*[\d:.\-]*\s*)?(?:\w+\()?(?P<code>E[A-Z0-9]\d{4})\)?:\s*"
    r"(?:\[PID:[^\]]*\]\s*)?(?:\d{4}-\d\d-\d\d[\d:.\-]*\s*)?(?P<text>.*)"
)
_TRAILER = re.compile(r"(?:\s*\[(?:FUNC|FILE|LINE|THREAD):[^\]]*\])+\s*$")
_SAYS_NOTHING = re.compile(
    r"^(inner error!?|TraceBack \(most recent call last\):?|Solution:.*|Possible Cause:.*|the error from this.*|)$",
    re.IGNORECASE,
)
_LOGGED = re.compile(r"\[E\d{4} [^\]]*\]\s*(?P<text>\S.*)")
"""An error that torch_npu's queue logs to stderr: `[E1201 14:59:49 OpParamMaker.cpp:580] ...`."""

_OPERATOR = re.compile(r"current working operator name is (\w+)")
_ADDED = re.compile(
    r"^(\[ERROR\] \d{4}-|\[Error\]:|\[?W\d{4} |Warning:|Since the operator is called|Note: ASCEND_LAUNCH|"
    r"Traceback|File \"|The Inner error is reported|NPUGRAPH DFX|Rectify the fault)"
)


@dataclass(frozen=True)
class Cause:
    """The first real cause: its text, the code that names it best, every code seen, and what to do."""

    text: str
    meaning: Meaning | None
    codes: tuple[str, ...]
    advice: str

    @property
    def code(self) -> str | None:
        """The code that names it best."""
        return None if self.meaning is None else self.meaning.code


_LAYERS = {"EZ9999", "EE9999", "EH9999", "EK9999", "E89999", "ERR00100", "ERR99999"}
"""These only say which layer noticed it."""

_UNKNOWN = "atbx doctor  # checks the installation"


def codes_in(text: str) -> tuple[str, ...]:
    """Every code in a text, in its order."""
    found = re.finditer(rf"{_NUMERIC.pattern}|\b(E[A-Z0-9]\d{{4}}|ERR\d{{5}})\b", text, re.IGNORECASE)
    return tuple(dict.fromkeys(m[1] or m[2].upper() for m in found))


def operator_in(text: str) -> str | None:
    """The launch that torch_npu's queue names as the one that failed, or None."""
    found = _OPERATOR.search(text)
    return found[1] if found else None


def first_cause(*texts: str) -> Cause:
    """The cause in what was printed and raised; earlier texts count first."""
    together = "\n".join(texts)
    codes = codes_in(together)
    lines = [line.strip() for line in together.splitlines()]
    text, line_code = _first_line(lines)
    by_text = next((meaning for pattern, meaning in TEXTS if pattern.search(text)), None)
    named = [
        code for code in ((line_code,) if line_code else ()) + codes if code in CODES and code not in _LAYERS
    ]
    if by_text is not None:
        meaning: Meaning | None = by_text
    elif named:
        # A number names the rule more closely than the E-code of the line does.
        meaning = CODES[next((code for code in named if code.isdigit()), named[0])]
    else:
        known = [code for code in codes if code in CODES]
        anywhere = next((m for line in lines for pattern, m in TEXTS if pattern.search(line)), None)
        meaning = anywhere or (CODES[known[0]] if known else None)
    return Cause(text, meaning, codes, meaning.advice if meaning is not None else _UNKNOWN)


def _first_line(lines: list[str]) -> tuple[str, str | None]:
    """The first line that says something: of an E-code, else of a known text, else any that nobody adds to all."""
    pending = None
    for line in lines:
        found = _LINE.match(line) or _LINE.search(line.partition("RuntimeError: ")[2])
        if found:
            text = _TRAILER.sub("", found["text"]).strip()
            if not _SAYS_NOTHING.match(text):
                return text, found["code"]
            pending = found["code"]
        elif pending is not None and not _SAYS_NOTHING.match(line) and not _ADDED.match(line):
            # "EZ9999: Inner Error!" alone: the line below it is the cause.
            return _TRAILER.sub("", line).strip(), pending
    for line in lines:
        logged = _LOGGED.match(line)
        if logged:
            return logged["text"], None
        if any(pattern.search(line) for pattern, _ in TEXTS):
            return line, None
    said = [line for line in lines if not _SAYS_NOTHING.match(line) and not _ADDED.match(line)]
    return (said[0] if said else ""), None
