"""Checks below CANN: the driver, the firmware, the device files, and the chip with its kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from atbx.doctor.findings import Finding, error, note, warning
from atbx.doctor.installation import ASCEND, Installation
from atbx.doctor.matrix import release_of
from atbx.doctor.packages import driver_command
from atbx.doctor.versions import Version, parse, parsed

DOCKER = (
    "docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc "
    "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi "
    "-v /etc/ascend_install.info:/etc/ascend_install.info IMAGE"
)


def check_devices(found: Installation, family: str | None) -> Iterator[Finding]:
    """Device files, and whether there is an NPU at all."""
    breaks = "device 'npu' cannot be opened (507033, 'no NPU'); the CPU backend works"
    if not found.devices:
        if found.is_container:
            yield error(
                "devices.container",
                "this container was given no NPU",
                found.shown(found.root / "dev"),
                breaks,
                expected="/dev/davinci0 and /dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc",
                found="no /dev/davinciN",
                mend=DOCKER,
            )
        elif found.families or found.driver is not None:
            yield error(
                "devices.missing",
                "the driver made no device files",
                found.shown(found.root / "dev"),
                breaks,
                expected="/dev/davinci0",
                found=f"an NPU of family {', '.join(found.families)} on the PCI bus"
                if found.families
                else "none",
                mend=driver_command(found, family, None),
            )
        else:
            yield warning(
                "devices.none",
                "Ascend software is installed, but there is no NPU and no driver",
                found.shown(found.root / "dev"),
                breaks,
                mend="atbx selftest --device npu --software",
            )
    elif found.missing_controls:
        names = ", ".join(f"/dev/{name}" for name in found.missing_controls)
        yield error(
            "devices.control",
            "device files that every process on an NPU opens are missing",
            found.shown(found.root / "dev"),
            "the device cannot be set (507899, drvErr)",
            expected=names,
            mend=DOCKER if found.is_container else driver_command(found, family, None),
        )


def check_driver(found: Installation, family: str | None, cann: Version | None) -> Iterator[Finding]:
    """The driver is there and new enough for CANN; the firmware is one that it names."""
    folder = f"/{ASCEND}/driver"
    if found.driver is None:
        if found.devices or found.families or found.is_container:
            yield error(
                "driver.missing",
                "the driver's files are not there",
                folder,
                "libascend_hal.so is missing, so no process can open an NPU (drvErr, dcmi errors)",
                mend=DOCKER if found.is_container else driver_command(found, family, None),
            )
        return
    version = found.driver.version
    lowest = release_of(cann) if cann is not None else None
    if version is None:
        yield warning(
            "driver.version",
            "the driver's version cannot be read",
            f"{folder}/version.info",
            "it cannot be compared with what CANN needs",
            mend="-v /usr/local/Ascend/driver/version.info for a container; npu-smi info shows it on the host",
        )
    elif lowest is not None and lowest.driver is not None and version < parse(lowest.driver):
        yield error(
            "driver.old",
            f"the driver is older than CANN {cann} supports",
            f"{folder}/version.info",
            "EE1015, 207000: an interface of the driver that CANN calls does not exist",
            expected=f"{lowest.driver} or newer",
            found=str(version),
            mend=driver_command(found, family, lowest.driver) + "  # on the host, then reboot",
        )
    elif version < parse("25.5.1"):
        yield note(
            "driver.streams",
            "driver 25.5.1 and newer has more streams for captured graphs",
            f"{folder}/version.info",
            "with many graphs a capture may end with 207008",
            found=str(version),
        )
    yield from _check_firmware(found)
    if found.npu_smi is None:
        yield note(
            "driver.npu_smi",
            "npu-smi is not there",
            "/usr/local/bin/npu-smi",
            "nothing in atbx; you cannot look at the devices",
            mend="-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi" if found.is_container else None,
        )


def _check_firmware(found: Installation) -> Iterator[Finding]:
    assert found.driver is not None
    firmware = found.firmware.version if found.firmware is not None else None
    ranges = re.findall(r"\[([^,\]]+),([^\]]+)\]", found.driver.facts.get("compatible_version_fw", ""))
    spans = [(parsed(low), parsed(high.strip("."))) for low, high in ranges]
    known = [(low, high) for low, high in spans if low is not None and high is not None]
    if firmware is None or not known:
        return
    # 7.7.0.1.231 lies in [7.0.0, 7.7.99]: only the numbers that the range has are compared.
    if not any(low.numbers <= firmware.numbers[:3] <= high.numbers for low, high in known):
        yield warning(
            "firmware.version",
            "the driver does not name this firmware among those that it works with",
            f"/{ASCEND}/firmware/version.info",
            "devices may fail to start or report health faults",
            expected=found.driver.facts["compatible_version_fw"],
            found=str(firmware),
            mend="bash Ascend-hdk-CHIP-npu-firmware_VERSION.run --full  # on the host, then reboot",
        )


def check_chip(found: Installation, chip: str | None, families: dict[str, str]) -> Iterator[Finding]:
    """The chip is one of the capability table; families: of each chip that the table knows."""
    if chip is not None and chip not in families:
        yield error(
            "chip.unknown",
            "the capability table has no such chip",
            "--chip",
            "no kernel is chosen for it: every op is refused",
            expected=", ".join(families),
            found=chip,
            mend="atbx doctor --chip Ascend910B3",
        )
    elif chip is not None and found.families and families[chip] not in found.families:
        yield warning(
            "chip.other",
            "the PCI bus has NPUs of another family",
            "--chip",
            "the findings on kernels are for a chip that is not here",
            expected=", ".join(found.families),
            found=f"{chip} ({families[chip]})",
            mend="atbx doctor",
        )
    family = families.get(chip or "") or (found.families[0] if len(found.families) == 1 else None)
    if family in ("310P", "910A"):
        yield note(
            "chip.bfloat16",
            f"chips of family {family} do not compute in bfloat16",
            "the chip",
            "models in bfloat16 are refused",
            mend="atbx generate MODEL --device npu --dtype float16",
        )
