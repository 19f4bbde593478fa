"""The sensors of what this process computes on: one card through an NVML that stays open, or the
processor.

They are read at most once a second, with the last minute of throttling. Every query may fail, and
then its value is `None`. A query that the card or its driver does not support is not repeated. A
lost card is reported as such and searched again. Starts no thread and has no clock: the engine asks
between two steps whether a sample is due. Does not judge what it reads (`policy.thermal` does), and
never sets anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import psutil
import pynvml

from workers.nvml.queries import GONE, Question, answers, handle_of, own_bytes, visible_card
from workers.readings import THROTTLE_ALARMS, SensorReading

#: How often what hardly changes is asked: limits, link, errors of the memory.
RARELY_S: Final = 30.0
#: How often NVML is opened again after it failed, or after the card was lost.
REOPEN_S: Final = 5.0

_NEVER: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})

#: Xid errors that an application causes, as in NVIDIA's k8s-device-plugin: they say nothing about
#: the card.
_APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
_MOST_EVENTS: Final = 16

#: Members of NVML's union of values, by nvmlValueType_t.
_VALUE_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_POWER: Final = pynvml.NVML_FI_DEV_POWER_INSTANT
_MEMORY_TEMPERATURE: Final = pynvml.NVML_FI_DEV_MEMORY_TEMP
_SLOWDOWN_TLIMIT: Final = pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT

#: The fields of a reading that are one question each, asked every time …
_OFTEN: Final = {
    "temperature_c": Question(
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"),
        (pynvml.NVML_TEMPERATURE_GPU,),
        float,
    ),
    "sm_clock_mhz": Question(("nvmlDeviceGetClockInfo",), (pynvml.NVML_CLOCK_SM,)),
    "memory_clock_mhz": Question(("nvmlDeviceGetClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    "utilisation_pct": Question(
        ("nvmlDeviceGetUtilizationRates",), convert=lambda rates: float(rates.gpu)
    ),
    "throttle_bits": Question(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    ),
    "fan_pct": Question(("nvmlDeviceGetFanSpeed",), convert=float),
}
#: … and rarely.
_RARELY: Final = {
    "power_limit_w": Question(
        ("nvmlDeviceGetEnforcedPowerLimit",), convert=lambda limit_mw: limit_mw / 1e3
    ),
    "sm_clock_max_mhz": Question(("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_SM,)),
    "pcie_generation": Question(("nvmlDeviceGetCurrPcieLinkGeneration",)),
    "pcie_lanes": Question(("nvmlDeviceGetCurrPcieLinkWidth",)),
}


class CardSensors:
    """One card, named by UUID or by index in the order of the PCI bus.

    Looked at as often as `read` is called.
    """

    def __init__(self, card: str) -> None:
        self._card = card
        self._is_open = False
        self._handle: Any = None
        self._events: Any = None
        self._never: set[tuple[object, ...]] = set()
        self._due_s: float | None = None
        self._rarely = SensorReading()
        self._slowdown_c: float | None = None
        self._slowdown_tlimit_c = 0.0
        self._closed_until_s: float | None = None
        self._lost = False
        self._xid: int | None = None

    def read(self, now_s: float) -> SensorReading:
        """Read once; never raises for an error of NVML.

        `now_s`, by any monotonic clock, decides what is due again.
        """
        if self._closed_until_s is not None and now_s < self._closed_until_s:
            return SensorReading(lost=self._lost)
        try:
            if self._handle is None:
                self._open()
            reading = self._look(now_s)
        except pynvml.NVMLError as error:  # no single question failed: nothing can be asked
            self.close()
            self._closed_until_s = now_s + REOPEN_S
            self._lost = self._lost or error.value in GONE
            return SensorReading(lost=self._lost)
        self._closed_until_s = None
        self._lost = False
        return reading

    def close(self) -> None:
        """Close NVML, if it is open. A later `read` opens it again."""
        with suppress(pynvml.NVMLError):
            if self._events is not None:
                pynvml.nvmlEventSetFree(self._events)
        with suppress(pynvml.NVMLError):
            if self._is_open:
                pynvml.nvmlShutdown()
        self._is_open = False
        self._handle = self._events = self._due_s = None

    def _open(self) -> None:
        """Open NVML and find the card; card, library and driver may be missing."""
        pynvml.nvmlInit()
        self._is_open = True
        self._handle = handle_of(self._card)
        with suppress(pynvml.NVMLError):  # WSL2 and Windows have no events
            events = pynvml.nvmlEventSetCreate()
            try:
                pynvml.nvmlDeviceRegisterEvents(
                    self._handle, pynvml.nvmlEventTypeXidCriticalError, events
                )
            except pynvml.NVMLError:
                pynvml.nvmlEventSetFree(events)
            else:
                self._events = events

    def _look(self, now_s: float) -> SensorReading:
        """Ask everything that is due; raises if the card is lost."""
        if self._due_s is None or now_s >= self._due_s:
            self._look_rarely()
            self._due_s = now_s + RARELY_S
        often = answers(_OFTEN, self._ask)
        fields = self._fields(_POWER, _MEMORY_TEMPERATURE)
        # On consumer cards since Ampere this fallback is an average over a second.
        power_mw = fields[_POWER] if _POWER in fields else self._ask("nvmlDeviceGetPowerUsage")
        return replace(
            self._rarely,
            **often,
            margin_c=self._margin_c(often["temperature_c"]),
            memory_temperature_c=fields.get(_MEMORY_TEMPERATURE)
            or None,  # GeForce says 0 for "not reported"
            power_w=None if power_mw is None else power_mw / 1e3,
            xid=self._last_xid(),
            process_used_bytes=own_bytes(self._ask),
        )

    def _look_rarely(self) -> None:
        self._rarely = SensorReading(
            **answers(_RARELY, self._ask),
            ecc_errors=self._ecc_errors(),
            remapped_rows=self._remapped_rows(),
        )
        self._slowdown_c = self._ask(
            "nvmlDeviceGetTemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        )
        self._slowdown_tlimit_c = self._fields(_SLOWDOWN_TLIMIT).get(_SLOWDOWN_TLIMIT, 0.0)

    def _margin_c(self, temperature_c: float | None) -> float | None:
        """Say how much warmer the die may get before the hardware slows down.

        Since Ada, NVML's margin counts to the highest temperature the card is meant to work at, and
        the slowdown is given as a (negative) margin; the two are on one scale (nvidia-smi(1),
        "T.Limit"). Older cards give absolute thresholds instead, which NVML's manual declares
        unreliable from Ada on.
        """
        margin_c = self._ask("nvmlDeviceGetMarginTemperature")
        if margin_c is not None:
            return float(margin_c - self._slowdown_tlimit_c)
        if temperature_c is None or self._slowdown_c is None:
            return None
        return self._slowdown_c - temperature_c

    def _remapped_rows(self) -> int | None:
        """Count the rows replaced after uncorrectable errors, where the product can replace rows at
        all.

        The query itself does not refuse on a 4090 (gpud, PR 351).
        """
        name = self._ask("nvmlDeviceGetName")
        if name is None or any(family in name.upper() for family in ("GEFORCE", "TITAN")):
            return None
        remapped = self._ask("nvmlDeviceGetRemappedRows")
        return None if remapped is None else int(remapped[1])

    def _ecc_errors(self) -> int | None:
        mode = self._ask("nvmlDeviceGetEccMode")
        if mode is None or mode[0] != pynvml.NVML_FEATURE_ENABLED:
            return None
        errors: int | None = self._ask(
            "nvmlDeviceGetTotalEccErrors",
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        return errors

    def _last_xid(self) -> int | None:
        """Take what the driver has told since the last look.

        An Xid of the card is kept until another comes.
        """
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # a timeout: nothing happened
                break
            if event.eventData not in _APPLICATION_XIDS:
                self._xid = int(event.eventData)
        return self._xid

    def _fields(self, *fields: int) -> dict[int, float]:
        """Ask for field values in one call; those that are not reported are missing."""
        wanted = tuple(field for field in fields if ("field", field) not in self._never)
        told = {}
        for value in (self._ask("nvmlDeviceGetFieldValues", wanted) or ()) if wanted else ():
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                told[int(value.fieldId)] = float(
                    getattr(value.value, _VALUE_MEMBERS[value.valueType])
                )
            else:
                self._note(("field", int(value.fieldId)), value.nvmlReturn)
        return told

    def _ask(self, function: str, *arguments: object) -> Any:  # noqa: ANN401 - nvidia-ml-py has no types
        """Ask the card one question, as `queries.answer` does, but remember what is not supported.

        Raises:
            pynvml.NVMLError: The card is lost.
        """
        question = (function, *arguments)
        ask = getattr(pynvml, function, None)
        if ask is None or question in self._never:
            return None
        try:
            return ask(self._handle, *arguments)
        except pynvml.NVMLError as error:
            self._note(question, error.value)
            return None

    def _note(self, question: tuple[object, ...], code: int) -> None:
        """Remember that a query is not supported; raises if the card is lost."""
        if code in GONE:
            raise pynvml.NVMLError(code)
        if code in _NEVER:
            self._never.add(question)


SAMPLE_EVERY_S: Final = 1.0
THROTTLE_WINDOW_S: Final = 60.0

#: Where Linux reports the temperature of a processor: driver, label of the package's sensor (None:
#: any of them).
_PACKAGE_SENSORS: Final = (
    ("coretemp", "Package id"),
    ("k10temp", "Tdie"),
    ("k10temp", "Tctl"),
    ("zenpower", "Tdie"),
    ("cpu_thermal", None),
)


class Sampler:
    """Reads some sensors, with at least `every_s` between two samples and the throttling of the
    last minute, and closes them.
    """

    def __init__(
        self, sensors: CardSensors | ProcessorSensors, *, every_s: float = SAMPLE_EVERY_S
    ) -> None:
        self._sensors = sensors
        self._every_s = every_s
        self._last_s: float | None = None
        self._alarms: deque[tuple[float, bool]] = deque()
        """Of the samples of the last minute that told: when, and whether they were alarms."""

    def sample_if_due(self, now_s: float) -> SensorReading | None:
        """Read the sensors; `None` if that was done a moment ago.

        The time is by any clock that does not go back.
        """
        if self._last_s is not None and now_s - self._last_s < self._every_s:
            return None
        self._last_s = now_s
        reading = self._sensors.read(now_s)
        if reading.throttle_bits is not None:
            self._alarms.append((now_s, bool(reading.throttle_bits & THROTTLE_ALARMS)))
        while self._alarms and now_s - self._alarms[0][0] >= THROTTLE_WINDOW_S:
            self._alarms.popleft()
        if reading.lost or not self._alarms:
            return reading
        count = sum(alarm for _, alarm in self._alarms)
        return replace(reading, throttle_pct=100.0 * count / len(self._alarms))

    def close(self) -> None:
        """Release NVML."""
        self._sensors.close()


class ProcessorSensors:
    """A computer without a card: the temperature of its processor, where the system reports it."""

    def read(self, now_s: float) -> SensorReading:  # noqa: ARG002 - nothing here is asked more rarely
        """Look once."""
        with suppress(OSError):
            return package_reading(psutil.sensors_temperatures())
        return package_reading({})

    def close(self) -> None:
        """Nothing is held."""


def package_reading(chips: Mapping[str, Sequence[Any]]) -> SensorReading:
    """Return the hottest processor package of what `psutil.sensors_temperatures` returns."""
    for driver, label in _PACKAGE_SENSORS:
        sensors = [
            sensor
            for sensor in chips.get(driver, ())
            if label is None or sensor.label.startswith(label)
        ]
        if sensors:
            hottest = max(sensors, key=lambda sensor: sensor.current)
            margin_c = hottest.critical - hottest.current if hottest.critical else None
            return SensorReading(
                temperature_c=hottest.current, margin_c=margin_c, of_processor=True
            )
    return SensorReading(of_processor=True)


def open_sampler(kind: str, card: str | None = None) -> Sampler:
    """Return the sampler of a device, whose kind is as in `DeviceInfo.kind`.

    The card is a UUID, or an index in the order of the PCI bus; by default the first that this
    process sees.
    """
    if kind == "cuda":
        return Sampler(CardSensors(card or visible_card()))
    return Sampler(ProcessorSensors())
